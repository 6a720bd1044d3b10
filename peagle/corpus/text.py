"""Rows of the formats that are text: JSON lines, plain text, and the two that have files of their own.

It turns lines into rows. A row that is no row is one all the same: it gets an id and, later, a dead letter that names
its file and line.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from peagle.corpus.csv_rows import csv_rows
from peagle.corpus.lines import Lines, lines_of
from peagle.corpus.openai_batch import batch_row
from peagle.corpus.rows import RawRow, Span
from peagle.plain_json import HalfSurrogate, require_unicode

TEXT_COLUMN = "prompt"
_DEEPEST = 500  # levels of a JSON row; Python's limit is 1000, less those of whoever calls
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """A row, the line that it begins on, and the header that it was read with (CSV only)."""

    row: RawRow
    line: int
    header: str = ""


def records(kind: str, lines: Lines, header: str = "") -> Iterator[Record]:
    """The rows of the lines; when one is out, `lines` stands exactly behind it.

    Args:
        kind: a format that is text.
        header: of a CSV file that is entered in the middle.
    """
    if kind == "csv":
        for csv_row in csv_rows(lines, header):
            yield Record(*csv_row)
        return
    parse = _PARSERS[kind]
    for line in lines:
        number = lines.number - 1
        if text := line.strip():
            yield Record(parse(text if kind != "text" else line, f"{lines.path} line {number}"), number)


def read_records(span: Span) -> Iterator[RawRow]:
    """The rows of a span, in order.

    Raises:
        InputError: the file cannot be read.
    """
    header = span.header if span.start else ""  # at the beginning of the file it is there to be read
    with lines_of(span) as lines:
        for record in records(span.format, lines, header):
            yield record.row


def _json_row(line: bytes, where: str) -> RawRow:
    try:
        text = line.removeprefix(_BOM).decode()  # of bytes `json.loads` would guess the encoding
        value = json.loads(text)
        require_unicode(text, value)
    except HalfSurrogate as error:
        return _no_row(line, f"{where}: {error}")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return _no_row(line, f"{where}: not valid JSON: {error}")
    if not isinstance(value, dict):
        return _no_row(line, f"{where}: a JSON {type(value).__name__}, not an object")
    if line.count(b"[") + line.count(b"{") > _DEEPEST and _is_deep(value):
        return _no_row(line, f"{where}: more than {_DEEPEST} levels deep")
    return RawRow(value)


def _is_deep(value: Any) -> bool:
    """Whether it is so deep that writing it as JSON again might not be possible, which goes down level by level."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _batch_row(line: bytes, where: str) -> RawRow:
    row = _json_row(line, where)
    return row if row.error else batch_row(row.columns, where)


def _text_row(line: bytes, where: str) -> RawRow:
    line = line.removeprefix(_BOM).rstrip(b"\r\n")
    try:
        return RawRow({TEXT_COLUMN: line.decode()})
    except UnicodeDecodeError as error:
        return _no_row(line, f"{where}: not valid UTF-8: {error}")


def _no_row(line: bytes, error: str) -> RawRow:
    return RawRow(raw=line.decode(errors="replace"), error=error)


_PARSERS: dict[str, Callable[[bytes, str], RawRow]] = {
    "jsonl": _json_row,
    "text": _text_row,
    "openai-batch": _batch_row,
}


def first_object(lines: Lines) -> dict[str, Any] | None:
    """The first row that is a JSON object: it tells an OpenAI batch from other JSON lines."""
    return next((one.row.columns for one in records("jsonl", lines) if one.row.error is None), None)
