"""Rows of text formats: JSON lines, plain text, CSV and OpenAI batches.

Invalid rows are also yielded: they get an id and, later, a dead letter with their file and line. The envelope of a
batch request is validated here, its body in `peagle/requests/builder.py`. Bodies are stored as JSON text.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from peagle.corpus.lines import MAX_LINE_BYTES, Lines, carriage_return_error, open_span
from peagle.corpus.rows import RawRow, Span
from peagle.corpus.schema import json_text
from peagle.errors import InputError, shown
from peagle.plain_json import HalfSurrogate, finite_float, refuse_constant, require_unicode, unique_keys
from peagle.requests.fields import URLS

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """A row, the number of its first line, and the header of its file (CSV only)."""

    row: RawRow
    line: int
    header: str = ""


def _csv_records(lines: Lines, header: str) -> Iterator[Record]:
    """Yield rows. `header` has the column names as JSON; if it is empty, the first line has the column names."""
    rows = _csv_rows(lines)
    if not header:
        header = _read_header(rows, lines.path)
    names = json.loads(header)
    for values, line in rows:
        yield Record(_csv_row(names, values, f"{lines.path} line {line}"), line, header)


def _csv_rows(lines: Lines) -> Iterator[tuple[list[str], int]]:
    """Yield the fields of each non-blank row, and the number of its first line."""
    csv.field_size_limit(MAX_LINE_BYTES)
    # While the first line is read, `lines.number` is already 2.
    without_bom = (line.removeprefix(_BOM) if lines.number == 2 else line for line in lines)
    # Invalid bytes are escaped, so that only the row that contains them is refused.
    reader = csv.reader((line.decode(errors="surrogateescape") for line in without_bom), strict=True)
    while True:
        number = lines.number
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "new-line character" in str(error):
                raise carriage_return_error(lines.path) from error
            raise InputError(
                f"input {lines.path} line {number}: not valid CSV: {error}",
                hint="double a quote inside a quoted field, and close every quote",
            ) from error
        if values:
            yield values, number


def _read_header(rows: Iterator[tuple[list[str], int]], path: str) -> str:
    """Return the column names as JSON; raises InputError if the header is invalid."""
    names, number = next(rows, ([], 1))
    where = f"input {path} line {number}"
    if not names:
        raise InputError(f"input {path}: no header line", hint="the first line must have the column names")
    for index, name in enumerate(names):
        if not _is_utf8(name):
            raise InputError(
                f"{where}: the name of column {index + 1} is not valid UTF-8",
                hint="convert the file, for example with iconv -f LATIN1 -t UTF-8",
            )
        if not name.strip():
            raise InputError(
                f"{where}: column {index + 1} of the header has no name",
                hint="name it; if it is the index of a pandas table, write df.to_csv(FILE, index=False)",
            )
        if name in names[:index]:
            raise InputError(f"{where}: the header names column {name!r} twice")
    return json.dumps(names)


def _csv_row(names: list[str], values: list[str], where: str) -> RawRow:
    text = ",".join(values)
    if not _is_utf8(text):
        raw = text.encode(errors="surrogateescape").decode(errors="replace")
        return RawRow(raw=raw, error=f"{where}: not valid UTF-8")
    if len(values) != len(names):
        return RawRow(raw=text, error=f"{where}: {len(values)} fields, but the header has {len(names)}")
    return RawRow(dict(zip(names, values, strict=True)))


def _is_utf8(decoded: str) -> bool:
    try:
        decoded.encode()
    except UnicodeEncodeError:
        return False
    return True


BATCH_COLUMNS = ("custom_id", "method", "url", "body")
BATCH_SCHEMA = pa.schema([*[(name, pa.string()) for name in BATCH_COLUMNS[:3]], json_text("body")])


def is_batch(columns: dict[str, Any]) -> bool:
    """Whether a row has the columns of a batch request."""
    return {"custom_id", "url", "body"} <= set(columns)


def envelope_error(columns: dict[str, Any]) -> str | None:
    """Return what is wrong with a batch request outside its body, or None."""
    missing = [name for name in BATCH_COLUMNS if columns.get(name) is None]
    if missing:
        return f"the request has no {' and no '.join(missing)}"
    if unknown := sorted(set(columns) - set(BATCH_COLUMNS)):
        return f"unknown key {shown(unknown[0])}: a request has {', '.join(BATCH_COLUMNS)}"
    custom_id, url = columns["custom_id"], columns["url"]
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id must be non-empty text, not {shown(custom_id)}"
    if columns["method"] != "POST":
        return f"method must be POST, not {shown(columns['method'])}"
    if url not in URLS:
        return f"url must be {' or '.join(URLS)}, not {shown(url)}"
    if not isinstance(columns["body"], dict):
        return f"body must be a JSON object, not a {type(columns['body']).__name__}"
    return None


_MAX_DEPTH = 500  # levels of a JSON row; Python's recursion limit is 1000, including the callers


def parse_records(text_format: str, lines: Lines, header: str = "") -> Iterator[Record]:
    """Yield the rows of a text format. After each row, `lines` is positioned exactly after it.

    `header` is needed if `lines` start in the middle of a CSV file.
    """
    if text_format == "csv":
        yield from _csv_records(lines, header)
        return
    parse = _PARSERS[text_format]
    for line in lines:
        number = lines.number - 1
        if text := line.strip():
            yield Record(parse(text if text_format != "text" else line, f"{lines.path} line {number}"), number)


def read_records(span: Span) -> Iterator[RawRow]:
    """Yield the rows of a span in order; raises InputError if the file cannot be read."""
    header = span.header if span.start else ""  # at the start of a file, the header is in the lines
    with open_span(span) as lines:
        for record in parse_records(span.format, lines, header):
            yield record.row


def _json_row(line: bytes, where: str, *, is_strict: bool = False) -> RawRow:
    """Parse a row. If `is_strict`, NaN and infinities, which Python writes into JSON, are refused."""
    try:
        text = line.removeprefix(_BOM).decode()  # `json.loads` would guess the encoding of bytes
        value = json.loads(
            text,
            parse_float=finite_float,
            parse_constant=refuse_constant if is_strict else None,
            object_pairs_hook=unique_keys,
        )
        require_unicode(text, value)
    except HalfSurrogate as error:
        return _invalid(line, f"{where}: {error}")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return _invalid(line, f"{where}: not valid JSON: {error}")
    if not isinstance(value, dict):
        return _invalid(line, f"{where}: a JSON {type(value).__name__}, not an object")
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _is_too_deep(value):
        return _invalid(line, f"{where}: more than {_MAX_DEPTH} levels deep")
    return RawRow(value)


def _is_too_deep(value: Any) -> bool:
    """Whether a value has too many levels to be written as JSON again."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _batch_row(line: bytes, where: str) -> RawRow:
    row = _json_row(line, where, is_strict=True)  # the body is stored as JSON text
    if row.error is None and (error := envelope_error(row.columns)):
        return RawRow(row.columns, error=f"{where}: {error}", reason="invalid")
    return row


def _text_row(line: bytes, where: str) -> RawRow:
    line = line.removeprefix(_BOM).rstrip(b"\r\n")
    try:
        return RawRow({"prompt": line.decode()})
    except UnicodeDecodeError as error:
        return _invalid(line, f"{where}: not valid UTF-8: {error}")


def _invalid(line: bytes, error: str) -> RawRow:
    return RawRow(raw=line.decode(errors="replace"), error=error)


_PARSERS: dict[str, Callable[[bytes, str], RawRow]] = {
    "jsonl": _json_row,
    "text": _text_row,
    "openai-batch": _batch_row,
}


def first_object(lines: Lines) -> dict[str, Any] | None:
    """Return the first valid JSON object, which distinguishes an OpenAI batch from other JSON lines."""
    return next((record.row.columns for record in parse_records("jsonl", lines) if record.row.error is None), None)
