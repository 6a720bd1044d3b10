"""Tags: KEY=VALUE pairs for grouping costs.

Records contain tags as JSON with sorted keys, so equal tags have equal text.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field, field_validator

from peagle.key_values import parse_pairs

NO_TAGS = "{}"
MAX_TAGS = 16
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_VALUE = re.compile(r"[A-Za-z0-9_.:/@+-][A-Za-z0-9_.:/@+ -]{0,127}")


class TagOptions(BaseModel):
    tags: dict[str, str] = Field(
        default_factory=dict,
        description="tag for `peagle cost --by tag`; may be repeated; a map in YAML",
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
        return validate_tags(tags)


def parse_tags(pairs: Iterable[str]) -> dict[str, str]:
    return validate_tags({key: value.strip() for key, value in parse_pairs(pairs).items()})


def validate_tags(tags: dict[str, str]) -> dict[str, str]:
    if len(tags) > MAX_TAGS:
        raise ValueError(f"{len(tags)} tags; at most {MAX_TAGS} are allowed")
    for key, value in tags.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"invalid tag name {key!r}: use a letter, then up to 62 letters, digits, '_', '.' or '-'")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"invalid value of the tag {key}: use 1 to 128 letters, digits, spaces and _.:/@+-")
    return tags


def tags_to_text(tags: Mapping[str, str]) -> str:
    """Return tags as JSON with sorted keys.

    >>> tags_to_text({"team": "search", "project": "x"})
    '{"project": "x", "team": "search"}'
    """
    return json.dumps(dict(tags), sort_keys=True)


def tags_from_text(text: str) -> dict[str, str]:
    tags = json.loads(text) if isinstance(text, str) else None
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise ValueError(f"invalid tags: {text!r}")
    return tags
