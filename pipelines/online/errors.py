"""Errors in the format of OpenAI's API.

Internal details are logged. Clients only get what they can act on.
"""

import math
from collections.abc import Mapping
from typing import Any

from peagle.requests.openai import error_body

NOT_IMPLEMENTED = 501
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    NOT_IMPLEMENTED: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OF_A_REQUEST_UNDER_WAY = (408, 413, 415, 431)
_OVERLOADED_RETRY_S = 5
_MOST_CHARS, _MOST_PARAM_CHARS = 2000, 200  # an error must not return a MiB from the request


class ApiError(Exception):
    """An error response.

    Args:
        status: of the HTTP response.
        message: for people.
        code: for programs, such as "model_not_found".
        param: the invalid field of the request.
        retry_after_s: when to retry; 0 if unknown.
        is_retryable: if False, OpenAI's clients do not retry even if the status alone would make them.
        allow: allowed methods, for a 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = 0,
        is_retryable: bool = True,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_retryable = is_retryable
        self.allow = allow

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        message, param = _cut(self.message, _MOST_CHARS), self.param and _cut(self.param, _MOST_PARAM_CHARS)
        return error_body(message, kind=kind, param=param, code=self.code)

    def headers(self) -> dict[str, str]:
        """Return the headers of the response.

        Retry-After if waiting helps, X-Should-Retry if retrying does not, Allow for a 405, and `Connection: close` if
        more of the refused request would arrive.
        """
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        headers |= {} if self.is_retryable else {"x-should-retry": "false"}
        headers |= {"allow": self.allow} if self.allow else {}
        return headers | ({"connection": "close"} if self.status in _OF_A_REQUEST_UNDER_WAY else {})


def _cut(text: str, most: int) -> str:
    """Shorten a text that may contain text from the client or vLLM."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def overloaded(message: str) -> ApiError:
    """Return a 503 that asks the client to retry."""
    return ApiError(503, message, code="overloaded", retry_after_s=_OVERLOADED_RETRY_S)


def from_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """Return the error for a request that pydantic refuses: 422 for a wrong type, 400 for a wrong value."""
    first = errors[0] if errors else {"msg": "invalid request", "loc": (), "type": "missing"}
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    kind, text = str(first.get("type", "")), str(first.get("msg", "invalid")).removeprefix("Value error, ")
    is_type = kind.endswith(("_type", "_parsing")) or kind in ("missing", "extra_forbidden", "json_invalid")
    status, code = (422, "invalid_type") if is_type else (400, "invalid_value")
    return ApiError(status, f"{where or 'body'}: {text}", code=code, param=where or None)
