"""Errors as OpenAI's API words them.

It knows statuses and shapes; it does not know when they occur (`serve/exceptions.py`). What went wrong inside is for
the log: a client learns of it only what it can act on.
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
_MOST_CHARS, _MOST_PARAM_CHARS = 2000, 200  # of an error: no client gets back a mebibyte that it sent


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: of the HTTP response.
        message: for the person who reads it.
        code: for the program that reads it, such as "model_not_found".
        param: the field of the request that is at fault.
        retry_after_s: when to retry; 0 if unknown.
        is_retryable: False makes OpenAI's clients give up where the status alone would make them retry.
        allow: methods of the path, of a 405.
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
        """The JSON of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        message, param = _cut(self.message, _MOST_CHARS), self.param and _cut(self.param, _MOST_PARAM_CHARS)
        return error_body(message, kind=kind, param=param, code=self.code)

    def headers(self) -> dict[str, str]:
        """Return the headers of an error.

        Retry-After if waiting helps, X-Should-Retry if retrying does not, Allow of a 405, and `Connection: close` if
        more of the refused request would arrive.
        """
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        headers |= {} if self.is_retryable else {"x-should-retry": "false"}
        headers |= {"allow": self.allow} if self.allow else {}
        return headers | ({"connection": "close"} if self.status in _OF_A_REQUEST_UNDER_WAY else {})


def _cut(text: str, most: int) -> str:
    """A text that may repeat what a client sent, or what vLLM says of it."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def overloaded(message: str) -> ApiError:
    """Nobody can take the request now."""
    return ApiError(503, message, code="overloaded", retry_after_s=_OVERLOADED_RETRY_S)


def from_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """Return the answer to a request that pydantic refuses: 422 for a wrong type, 400 for a wrong value."""
    first = errors[0] if errors else {"msg": "invalid request", "loc": (), "type": "missing"}
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    kind, text = str(first.get("type", "")), str(first.get("msg", "invalid")).removeprefix("Value error, ")
    is_type = kind.endswith(("_type", "_parsing")) or kind in ("missing", "extra_forbidden", "json_invalid")
    status, code = (422, "invalid_type") if is_type else (400, "invalid_value")
    return ApiError(status, f"{where or 'body'}: {text}", code=code, param=where or None)
