"""Lists in pages, as OpenAI's API has them: so many, after the one with this id.

Pure. It knows ids and lists, no files and no HTTP.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from peagle.errors import shown
from pipelines.online.errors import ApiError


class _Shown(Protocol):
    @property
    def id(self) -> str:
        """By which a page begins after it."""

    def show(self) -> dict[str, Any]:
        """As the API has it."""


Item = TypeVar("Item", bound=_Shown)


def page(items: Sequence[Item], *, after: str | None, limit: int) -> dict[str, Any]:
    """A page of a list.

    Raises:
        ApiError: `after` is none of the list.
    """
    begin = 0 if after is None else _index(items, after) + 1
    shown = [item.show() for item in items[begin : begin + limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": begin + limit < len(items),
    }


def _index(items: Sequence[_Shown], after: str) -> int:
    for index, item in enumerate(items):
        if item.id == after:
            return index
    raise ApiError(400, f"after: there is no {shown(after)} in this list", code="invalid_value", param="after")
