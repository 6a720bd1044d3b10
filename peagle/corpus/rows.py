"""Rows of a corpus, ranges of rows, and estimates of their work."""

import json
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
"""Values by column name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows `first_row` to `first_row + num_rows - 1` of one file."""

    path: str
    format: str
    first_row: int
    num_rows: int
    start: int = 0  # byte positions in the decompressed file (not for Parquet)
    end: int = 0
    line: int = 1  # number of the line at `start`, from 1 (not for Parquet)
    header: str = ""  # column names as a JSON list (CSV only)
    work: int = 0  # estimated work; 0 in older plans


@dataclass(frozen=True, slots=True)
class RawRow:
    """The columns of a row, or an error. A row without columns keeps its text in `raw`."""

    columns: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: str | None = None
    reason: str = "invalid_row"


_BYTES_PER_TOKEN = 4
_PROMPT_TOKEN_WORK = 0.1  # work relative to an output token; a step can prefill many prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEstimate:
    """Estimates the work of a row in output tokens, from its own `max_tokens` or the run's.

    The estimate only determines the order of units. A response is assumed to have its maximum length.
    """

    max_tokens: int = 0
    column: str = "sampling"  # the column with a row's own sampling parameters

    def of_row(self, row: RawRow, num_bytes: int) -> int:
        """Return the work of a row with `num_bytes` of text; 0 for an invalid row."""
        if row.error is not None:
            return 0
        parameters = _parameters(row.columns.get("body")) or _parameters(row.columns.get(self.column))
        max_tokens = parameters.get("max_completion_tokens") or parameters.get("max_tokens") or self.max_tokens
        num_responses = parameters.get("n") or 1
        num_output_tokens = self.max_tokens
        if all(type(count) is int and 0 < count < 2**31 for count in (max_tokens, num_responses)):  # not yet validated
            num_output_tokens = max_tokens * num_responses
        return num_output_tokens + self.of_prompt(num_bytes)

    def of_rows(self, num_rows: int, num_bytes: float) -> int:
        """Return the work of rows that have `num_bytes` in total."""
        return num_rows * self.max_tokens + self.of_prompt(num_bytes)

    @staticmethod
    def of_prompt(num_bytes: float) -> int:
        return int(num_bytes / _BYTES_PER_TOKEN * _PROMPT_TOKEN_WORK)


def _parameters(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
