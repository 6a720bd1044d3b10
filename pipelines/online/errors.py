"""Errors in the format of OpenAI's API, and the conversion of Ray's and vLLM's exceptions.

Clients only get errors that they can act on. Exceptions are recognized by class name, since not every process can
import Ray and vLLM, and Ray wraps a replica's exceptions in subclasses of the originals.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from peagle.requests.openai import error_body

NOT_IMPLEMENTED = 501
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    NOT_IMPLEMENTED: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MAX_CHARS, _MAX_PARAM_CHARS = 2000, 200  # an error must not echo a MiB of the request


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """An error response."""

    status: int
    message: str
    _: KW_ONLY
    code: str | None = None  # machine-readable, such as "model_not_found"
    param: str | None = None  # the invalid field of the request
    retry_after_s: float = 0  # seconds until a retry can succeed; 0 if unknown
    is_retryable: bool = True  # if False, OpenAI's clients do not retry even if the status alone would make them
    allow: str = ""  # allowed methods, for a 405

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        error_type = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        message, param = _cut(self.message, _MAX_CHARS), self.param and _cut(self.param, _MAX_PARAM_CHARS)
        return error_body(message, kind=error_type, param=param, code=self.code)

    def headers(self) -> dict[str, str]:
        """Return the headers of the response: how to retry, allowed methods, and whether the connection is closed."""
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        headers |= {} if self.is_retryable else {"x-should-retry": "false"}
        headers |= {"allow": self.allow} if self.allow else {}
        is_unread = self.status in (408, 413, 415, 431)  # the rest of the request may still arrive
        return headers | ({"connection": "close"} if is_unread else {})


def _cut(text: str, max_chars: int) -> str:
    """Shorten a text that may contain text from the client or vLLM."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text):,} characters)"


def overloaded(message: str) -> ApiError:
    """Return a 503 that asks the client to retry."""
    return ApiError(503, message, code="overloaded", retry_after_s=5)


def from_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """Return the error for a request that pydantic refuses: 422 for a wrong type, 400 for a wrong value."""
    first = errors[0] if errors else {"msg": "invalid request", "loc": (), "type": "missing"}
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    error_type, message = str(first.get("type", "")), str(first.get("msg", "invalid")).removeprefix("Value error, ")
    is_type_error = error_type in ("missing", "extra_forbidden", "json_invalid")
    is_type_error |= error_type.endswith(("_type", "_parsing"))
    status, code = (422, "invalid_type") if is_type_error else (400, "invalid_value")
    return ApiError(status, f"{where or 'body'}: {message}", code=code, param=where or None)


# vLLM raises these while validating a body; they are not ValueErrors, so pydantic does not catch them.
_STATUS_OF_VLLM_ERRORS = {"VLLMNotFoundError": 404, "VLLMUnprocessableEntityError": 422, "VLLMClientError": 400}
_UNAVAILABLE = (
    "EngineUnavailable",
    "BackPressureError",
    "DeploymentUnavailableError",
    "RayActorError",
    "ActorDiedError",
    "EngineDeadError",
)
_ENGINE_DEATHS = ("ActorDiedError", "EngineDeadError")


class EngineUnavailable(Exception):  # noqa: N818 - not an error of the request
    """The engine was already dead when the request arrived, so the request cannot be the cause."""


def is_engine_death(error: BaseException) -> bool:
    """Return whether the engine crashed while it ran the request."""
    return any(name in _ENGINE_DEATHS for name in _class_names(error))


def is_engine_unavailable(error: BaseException) -> bool:
    """Return whether the request never reached a live engine."""
    return EngineUnavailable.__name__ in _class_names(error)


def from_exception(error: BaseException) -> ApiError:
    """Return the API error for an exception, with the exception's text only if the text is meant for clients."""
    if isinstance(error, ApiError):
        return error
    names = _class_names(error)
    if any(name in _UNAVAILABLE for name in names):
        return overloaded("all engines are busy or starting; try again")
    if vllm_error := next((name for name in _STATUS_OF_VLLM_ERRORS if name in names), None):
        message, param = str(error.args[0] if error.args else error), getattr(error, "parameter", None)
        return ApiError(_STATUS_OF_VLLM_ERRORS[vllm_error], message, code="invalid_value", param=param)
    status = getattr(error, "status_code", None)
    detail = getattr(error, "detail", None) or getattr(error, "message", None)
    if isinstance(status, int) and isinstance(detail, str) and (400 <= status < 500 or status == NOT_IMPLEMENTED):
        return ApiError(status, detail, code="not_found" if status == 404 else None)
    return ApiError(500, "internal server error; the request can be retried", code="internal_error")


def _class_names(error: BaseException) -> list[str]:
    return [error_class.__name__ for error_class in type(error).mro()]
