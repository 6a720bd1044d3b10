"""Private names of Starlette and FastAPI that the gate needs. It knows no Ray."""

from typing import Any

from starlette._utils import get_route_path
from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path as the application's router matches it.

    Without the prefix under which Serve has the application, which it leaves in `path`.
    """
    return get_route_path(scope)


def validated(field: Any, value: Any) -> tuple[Any, list[Any]]:
    """A body's value by its FastAPI field, or the faults that were found."""
    found: tuple[Any, list[Any]] = field.validate(value, {}, loc=("body",))
    return found
