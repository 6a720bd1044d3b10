"""Tags of a request: the endpoint's, its key's, and those that it adds itself.

    X-Peagle-Tags: project=x, run=7

Of several of the same name the request's counts before the key's, and the key's before the endpoint's.
"""

from collections.abc import Mapping

from starlette.types import Scope

from peagle.economics.tags import parse_tags, tags_to_text
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import LOCAL, KeyRecord
from pipelines.online.wire import header

TAGS_HEADER = "x-peagle-tags"


def tags_of(scope: Scope, key: KeyRecord, endpoint: Mapping[str, str]) -> str:
    """All tags of a request, as the ledger has them.

    Args:
        endpoint: those of the endpoint.

    Raises:
        ApiError: 422, the header holds no tags; 403, the key does not let its requests set one of them.
    """
    text = header(scope, TAGS_HEADER)
    try:
        own = parse_tags(text.split(",")) if text else {}
    except ValueError as error:
        raise ApiError(400, f"{TAGS_HEADER}: {error}", code="invalid_value", param=TAGS_HEADER) from error
    if key != LOCAL and (refused := sorted(own.keys() - set(key.request_tags))):
        message = f"this key does not let its requests set the tag {refused[0]}"
        raise ApiError(403, message, code="tag_not_allowed", param=TAGS_HEADER)
    return tags_to_text({**endpoint, **key.tags, **own})
