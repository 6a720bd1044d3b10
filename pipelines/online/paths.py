"""Paths that no request may have, for the gate and for what stands before Serve's proxy. It knows ASGI alone."""

from starlette.types import Scope

from pipelines.online.errors import ApiError


def path_refusal(scope: Scope) -> ApiError | None:
    """The answer to a path with control characters or line breaks of any alphabet; None for any other.

    Regular expressions, logs and other people's proxies read such a path differently: `$` of Python's matches before a
    line break at its end.
    """
    if scope["path"].isprintable():
        return None
    return ApiError(400, "the path has characters that cannot be printed", code="invalid_path")
