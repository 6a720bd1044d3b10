"""SageMaker's one route for requests, as the routes of the API that they mean.

SageMaker hands on a client's body, and of its headers only those that begin with X-Amzn-SageMaker-. So the client says
the rest in X-Amzn-SageMaker-Custom-Attributes, as with AWS's own vLLM container: `route=/v1/completions`, beside it
`key=KEY` where the endpoint has keys, and `method=GET` for what is read. Without a route the body says whether it is a
chat. It knows ASGI, no keys and no limits.
"""

import re

from starlette.types import Scope

from pipelines.online.gateway.routes import Rule, post
from pipelines.online.serve.http_names import route_path
from pipelines.online.wire import INVOCATIONS_URL, header, with_headers

ATTRIBUTES_HEADER = "x-amzn-sagemaker-custom-attributes"
INVOCATIONS = post(INVOCATIONS_URL, Rule.GENERATION)
"""In the gate's table alone: what it lets in is answered by the route of the API."""
_ATTRIBUTE = re.compile(r"([a-z]+)=([^\s,]+)")


def as_api(scope: Scope) -> Scope:
    """A request as a client of the API would have sent it.

    One that is not SageMaker's stays as it is; one that names no route keeps its path.
    """
    if route_path(scope) != INVOCATIONS_URL:
        return scope
    said = dict(_ATTRIBUTE.findall(header(scope, ATTRIBUTES_HEADER) or ""))
    if "key" in said:
        scope = {**scope, "headers": with_headers(scope["headers"], {"authorization": f"Bearer {said['key']}"})}
    if "route" in said:
        scope = {**at(scope, said["route"]), "method": said.get("method", scope["method"])}
    return scope


def at(scope: Scope, path: str) -> Scope:
    """The request at another path of the same application."""
    whole = scope.get("root_path", "") + path
    return {**scope, "path": whole, "raw_path": whole.encode()}
