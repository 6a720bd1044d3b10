"""Private names of Starlette and FastAPI that the gate needs."""

from typing import Any

from starlette._utils import get_route_path
from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Return the path without Serve's prefix, as the application's router matches it."""
    return get_route_path(scope)


def validate_body(field: Any, value: Any) -> tuple[Any, list[Any]]:
    """Validate a body with its FastAPI field. Returns the value and the errors."""
    result: tuple[Any, list[Any]] = field.validate(value, {}, loc=("body",))
    return result
