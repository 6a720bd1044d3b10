"""Tags: KEY=VALUE pairs that say for whom money is spent.

A record holds them as JSON text with sorted keys, so that equal tags are equal text and any tool can read them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field, field_validator

from peagle.pairs import parse_pairs

NO_TAGS = "{}"
"""The text of no tags."""
MOST_TAGS = 16
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_VALUE = re.compile(r"[A-Za-z0-9_.:/@+-][A-Za-z0-9_.:/@+ -]{0,127}")


class TagKeys(BaseModel):
    """The key of tags, among those of commands that spend money."""

    tags: dict[str, str] = Field(
        default_factory=dict,
        description="tag of the spending, for `peagle cost --by tag`; may be repeated; a map in YAML",
        json_schema_extra={"flag": "tag", "metavar": "KEY=VALUE"},
    )

    @field_validator("tags", mode="before")
    @classmethod
    def _tags_as_pairs(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.split(",")
        return parse_tags(map(str, value)) if isinstance(value, list) else value

    @field_validator("tags")
    @classmethod
    def _tags_are_plain(cls, tags: dict[str, str]) -> dict[str, str]:
        return checked_tags(tags)


def parse_tags(pairs: Iterable[str]) -> dict[str, str]:
    """Tags from KEY=VALUE.

    Raises:
        ValueError: as `parse_pairs` and `checked_tags`.

    >>> parse_tags(["team=search", "project=x"])
    {'team': 'search', 'project': 'x'}
    """
    return checked_tags({key: value.strip() for key, value in parse_pairs(pairs).items()})


def checked_tags(tags: dict[str, str]) -> dict[str, str]:
    """The same tags, if their keys and values are plain.

    Raises:
        ValueError: they are not, or they are too many.
    """
    if len(tags) > MOST_TAGS:
        raise ValueError(f"there are {len(tags)} tags, and {MOST_TAGS} at most are kept")
    for key, value in tags.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"the tag {key!r} must be a letter and up to 62 letters, digits, '_', '.' and '-'")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"the tag {key} must have 1 to 128 letters, digits, spaces and _.:/@+- as its value")
    return tags


def tags_to_text(tags: Mapping[str, str]) -> str:
    """The form of a record: JSON with sorted keys.

    >>> tags_to_text({"team": "search", "project": "x"})
    '{"project": "x", "team": "search"}'
    """
    return json.dumps(dict(tags), sort_keys=True)


def tags_from_text(text: str) -> dict[str, str]:
    """The inverse of `tags_to_text`.

    Raises:
        ValueError: it is no such text.
    """
    tags = json.loads(text) if isinstance(text, str) else None
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise ValueError(f"these are no tags: {text!r}")
    return tags
