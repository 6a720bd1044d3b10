"""Converts exceptions of Ray and vLLM to API errors.

They are recognized by class name: not every process that imports this has Ray and vLLM, and Ray wraps a replica's
exceptions in subclasses of the originals.
"""

from pipelines.online.errors import NOT_IMPLEMENTED, ApiError, overloaded

# vLLM raises these while validating a body; they are not ValueErrors, so pydantic does not catch them.
_OF_THE_REQUEST = {"VLLMNotFoundError": 404, "VLLMUnprocessableEntityError": 422, "VLLMClientError": 400}
_UNAVAILABLE = (
    "EngineUnavailable",
    "BackPressureError",
    "DeploymentUnavailableError",
    "RayActorError",
    "ActorDiedError",
    "EngineDeadError",
)
_ENGINE_DEATHS = ("ActorDiedError", "EngineDeadError")


class EngineUnavailable(Exception):  # noqa: N818 - it says nothing about the request
    """The engine was already dead when the request arrived, so the request cannot be the cause."""


def is_engine_death(error: BaseException) -> bool:
    """Return whether the engine crashed while it ran the request."""
    return any(name in _ENGINE_DEATHS for name in _names(error))


def is_engine_unavailable(error: BaseException) -> bool:
    """Return whether the request never reached a live engine."""
    return EngineUnavailable.__name__ in _names(error)


def from_exception(error: BaseException) -> ApiError:
    """Return the API error for an exception. Contains its text only if it is meant for clients."""
    if isinstance(error, ApiError):
        return error
    names = _names(error)
    if any(name in _UNAVAILABLE for name in names):
        return overloaded("all engines are busy or starting; try again")
    if refused := next((name for name in _OF_THE_REQUEST if name in names), None):
        param = getattr(error, "parameter", None)
        return ApiError(
            _OF_THE_REQUEST[refused], str(error.args[0] if error.args else error), code="invalid_value", param=param
        )
    status = getattr(error, "status_code", None)
    text = getattr(error, "detail", None) or getattr(error, "message", None)
    if isinstance(status, int) and isinstance(text, str) and (400 <= status < 500 or status == NOT_IMPLEMENTED):
        return ApiError(status, text, code="not_found" if status == 404 else None)
    return ApiError(500, "the server failed; the request may be tried again", code="internal_error")


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]
