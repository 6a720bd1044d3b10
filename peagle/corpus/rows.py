"""Rows of a corpus: a range of one file, one row, and its guessed work.

Records only; it knows no format.

The guess decides only in which order units are handed out, so it may be wrong: its unit is an output token, prompts are
guessed from bytes, and a response is taken to be as long as it may be.
"""

import json
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
"""A row by its columns' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows `first_row ..< first_row + num_rows` of one file.

    Attributes:
        start, end: their bytes, counted in the decompressed file (not for Parquet).
        line: number of the line at `start`, from 1 (not for Parquet).
        header: names of the columns as a JSON list (CSV only).
        work: a guess of the work in its rows (`rows.py`); 0 in plans that are older than it.
    """

    path: str
    format: str
    first_row: int
    num_rows: int
    start: int = 0
    end: int = 0
    line: int = 1
    header: str = ""
    work: int = 0


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row's columns, or why it is not a row.

    A row without columns keeps its text.
    """

    columns: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: str | None = None
    reason: str = "invalid_row"


_BYTES_PER_TOKEN = 4
_PROMPT_TOKEN = 0.1  # of an output token: prompts are read many tokens a step


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEstimate:
    """The work of a row, in output tokens, from the run's `max_tokens` or its own.

    Attributes:
        column: the column of a row's own sampling parameters.
    """

    max_tokens: int = 0
    column: str = "sampling"

    def of_row(self, row: RawRow, num_bytes: int) -> int:
        """The work of a text row that takes `num_bytes` of its file; 0 for an invalid one."""
        if row.error is not None:
            return 0
        own = _parameters(row.columns.get("body")) or _parameters(row.columns.get(self.column))
        max_tokens = own.get("max_completion_tokens") or own.get("max_tokens") or self.max_tokens
        num_responses = own.get("n") or 1
        wanted = max_tokens * num_responses if _are_counts(max_tokens, num_responses) else self.max_tokens
        return wanted + self.of_prompt(num_bytes)

    def of_rows(self, num_rows: int, num_bytes: float) -> int:
        """The work of rows of which only the bytes are known."""
        return num_rows * self.max_tokens + self.of_prompt(num_bytes)

    @staticmethod
    def of_prompt(num_bytes: float) -> int:
        """The work of reading a prompt."""
        return int(num_bytes / _BYTES_PER_TOKEN * _PROMPT_TOKEN)


def _parameters(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _are_counts(*values: Any) -> bool:
    """Whether the values can be multiplied.

    A row's own may be anything; they are checked when the row is prepared.
    """
    return all(type(value) is int and 0 < value < 2**31 for value in values)
