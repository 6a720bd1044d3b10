"""Maps SageMaker's single route to routes of the API.

SageMaker forwards the body and only headers that begin with X-Amzn-SageMaker-. So clients set
X-Amzn-SageMaker-Custom-Attributes as with AWS's own vLLM container: `route=/v1/completions`, `key=KEY` if the endpoint
has keys, and `method=GET` for reads. Without a route, the body determines the path.
"""

import re

from starlette.types import Scope

from pipelines.online.gateway.routes import Rule, post
from pipelines.online.serve.http_names import route_path
from pipelines.online.wire import INVOCATIONS_URL, header, with_headers

ATTRIBUTES_HEADER = "x-amzn-sagemaker-custom-attributes"
INVOCATIONS = post(INVOCATIONS_URL, Rule.GENERATION)
"""Only in the gate's table; the API route answers."""
_ATTRIBUTE = re.compile(r"([a-z]+)=([^\s,]+)")


def to_api_request(scope: Scope) -> Scope:
    """Return the equivalent API request. Other requests, and those without a route, keep their path."""
    if route_path(scope) != INVOCATIONS_URL:
        return scope
    attributes = dict(_ATTRIBUTE.findall(header(scope, ATTRIBUTES_HEADER) or ""))
    if "key" in attributes:
        scope = {**scope, "headers": with_headers(scope["headers"], {"authorization": f"Bearer {attributes['key']}"})}
    if "route" in attributes:
        scope = {**at(scope, attributes["route"]), "method": attributes.get("method", scope["method"])}
    return scope


def at(scope: Scope, path: str) -> Scope:
    """Return the request with another path of the same application."""
    whole = scope.get("root_path", "") + path
    return {**scope, "path": whole, "raw_path": whole.encode()}
