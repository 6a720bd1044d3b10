"""What is read of a corpus: a range of rows of one file, and one row.

Records only; it knows no format.
"""

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
        work: a guess of the work in its rows (`workload.py`); 0 in plans that are older than it.
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
    """One row as it was read: its columns; or why it is not a row, with its text where it has no columns."""

    columns: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: str | None = None
    reason: str = "invalid_row"
