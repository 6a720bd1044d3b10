"""Rows of the text formats: JSON lines, plain text, CSV and OpenAI batches.

It turns lines into rows. A row that is no row is one all the same: it gets an id and, later, a dead letter that names
its file and line.

A batch's envelope is checked here; what is in a body is checked where prompts and sampling parameters are
(`peagle/requests/builder.py`). A body is carried as JSON text: bodies differ from row to row.

Every value of CSV is text. A row is only ever cut between records, so the reader counts what the `csv` module pulls.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from peagle.corpus.lines import MAX_LINE_BYTES, Lines, carriage_returns, lines_of
from peagle.corpus.rows import RawRow, Span
from peagle.corpus.schema import json_text
from peagle.errors import InputError, shown
from peagle.plain_json import HalfSurrogate, finite_float, refuse_constant, require_unicode, unique_keys
from peagle.requests.fields import URLS


def csv_rows(lines: Lines, header: str = "") -> Iterator[tuple[RawRow, int, str]]:
    """Rows, the lines that they begin on, and the header.

    Args:
        header: names of the columns as JSON, where the lines do not begin with them.

    Raises:
        InputError: no usable header, or a quote that never ends: where the next row begins is then unknown.
    """
    records = _records(lines)
    if not header:
        header = _header(records, lines.path)
    names = json.loads(header)
    for values, number in records:
        yield _row(names, values, f"{lines.path} line {number}"), number, header


def _records(lines: Lines) -> Iterator[tuple[list[str], int]]:
    """Records that are not blank, and the lines that they begin on."""
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader((_decode(line, first=lines.number == 2) for line in lines), strict=True)
    while True:
        number = lines.number
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "new-line character" in str(error):
                raise carriage_returns(lines.path) from error
            raise InputError(
                f"input {lines.path} line {number}: not valid CSV: {error}",
                hint="a quote inside a quoted field is written twice; every quote must be closed",
            ) from error
        if values:
            yield values, number


def _decode(line: bytes, *, first: bool) -> str:
    if first:
        line = line.removeprefix(b"\xef\xbb\xbf")
    return line.decode(errors="surrogateescape")  # a record with such a character is refused, its neighbours are not


def _header(records: Iterator[tuple[list[str], int]], path: str) -> str:
    names, number = next(records, ([], 1))
    where = f"input {path} line {number}"
    if not names:
        raise InputError(f"input {path}: there is no header line", hint="the first line names the columns")
    for index, name in enumerate(names):
        if not _is_utf8(name):
            raise InputError(
                f"{where}: the name of column {index + 1} is not valid UTF-8",
                hint="convert the file, for example with iconv -f LATIN1 -t UTF-8",
            )
        if not name.strip():
            raise InputError(
                f"{where}: column {index + 1} of the header has no name",
                hint="name it; pandas writes its index so: df.to_csv(FILE, index=False)",
            )
        if name in names[:index]:
            raise InputError(f"{where}: the header names column {name!r} twice")
    return json.dumps(names)


def _row(names: list[str], values: list[str], where: str) -> RawRow:
    text = ",".join(values)
    if not _is_utf8(text):
        raw = text.encode(errors="surrogateescape").decode(errors="replace")
        return RawRow(raw=raw, error=f"{where}: not valid UTF-8")
    if len(values) != len(names):
        return RawRow(raw=text, error=f"{where}: {len(values)} fields where the header has {len(names)}")
    return RawRow(dict(zip(names, values, strict=True)))


def _is_utf8(decoded: str) -> bool:
    """Whether text that `_decode` made was UTF-8."""
    try:
        decoded.encode()
    except UnicodeEncodeError:
        return False
    return True


BATCH_COLUMNS = ("custom_id", "method", "url", "body")
BATCH_SCHEMA = pa.schema([*[(name, pa.string()) for name in BATCH_COLUMNS[:3]], json_text("body")])


def is_batch(columns: dict[str, Any]) -> bool:
    """Whether a row has the columns that a request of a batch needs."""
    return {"custom_id", "url", "body"} <= set(columns)


def batch_row(columns: dict[str, Any], where: str) -> RawRow:
    """The row, with what is wrong with its envelope if something is."""
    error = envelope_error(columns)
    return RawRow(columns, error=f"{where}: {error}", reason="invalid") if error else RawRow(columns)


def envelope_error(columns: dict[str, Any]) -> str | None:
    """The fault of a request around its body; None without one."""
    missing = [name for name in BATCH_COLUMNS if columns.get(name) is None]
    if missing:
        return f"the request has no {' and no '.join(missing)}"
    if unknown := sorted(set(columns) - set(BATCH_COLUMNS)):
        return f"unknown key {shown(unknown[0])}: a request has {', '.join(BATCH_COLUMNS)}"
    custom_id, url = columns["custom_id"], columns["url"]
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id must be text that is not empty, not {shown(custom_id)}"
    if columns["method"] != "POST":
        return f"method must be POST, not {shown(columns['method'])}"
    if url not in URLS:
        return f"url must be {' or '.join(URLS)}, not {shown(url)}"
    if not isinstance(columns["body"], dict):
        return f"body must be a JSON object, not a {type(columns['body']).__name__}"
    return None


TEXT_COLUMN = "prompt"
_DEEPEST = 500  # levels of a JSON row; Python's limit is 1000, less those of whoever calls
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """A row, its first line's number, and the header it was read with (CSV only)."""

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


def _json_row(line: bytes, where: str, *, is_strict: bool = False) -> RawRow:
    """Parse a row.

    Args:
        is_strict: refuse NaN and infinities, which Python writes into JSON; else they are carried as numbers.
    """
    try:
        text = line.removeprefix(_BOM).decode()  # of bytes `json.loads` would guess the encoding
        value = json.loads(
            text,
            parse_float=finite_float,
            parse_constant=refuse_constant if is_strict else None,
            object_pairs_hook=unique_keys,
        )
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
    """Whether it is too deep to be written as JSON again, level by level."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _batch_row(line: bytes, where: str) -> RawRow:
    row = _json_row(line, where, is_strict=True)  # a body is carried as JSON text
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
    """The first row that is a JSON object.

    It tells an OpenAI batch from other JSON lines.
    """
    return next((one.row.columns for one in records("jsonl", lines) if one.row.error is None), None)
