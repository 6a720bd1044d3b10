"""Tags of a request: from the endpoint, its key, and the header `X-Peagle-Tags: project=x, run=7`.

The request's tags take precedence over the key's, and these over the endpoint's.
"""

from collections.abc import Mapping

from starlette.types import Scope

from peagle.economics.tags import parse_tags, tags_to_text
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import LOCAL, KeyRecord
from pipelines.online.wire import header

TAGS_HEADER = "x-peagle-tags"


def tags_of(scope: Scope, key: KeyRecord, endpoint: Mapping[str, str]) -> str:
    """Return all tags of a request in the form of the ledger.

    Args:
        endpoint: the endpoint's tags.

    Raises:
        ApiError: 400, invalid header; 403, the key's requests may not set a tag.
    """
    text = header(scope, TAGS_HEADER)
    try:
        own = parse_tags(text.split(",")) if text else {}
    except ValueError as error:
        raise ApiError(400, f"{TAGS_HEADER}: {error}", code="invalid_value", param=TAGS_HEADER) from error
    if key != LOCAL and (refused := sorted(own.keys() - set(key.request_tags))):
        message = f"requests with this key may not set the tag {refused[0]}"
        raise ApiError(403, message, code="tag_not_allowed", param=TAGS_HEADER)
    return tags_to_text({**endpoint, **key.tags, **own})
