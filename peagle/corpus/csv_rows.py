"""CSV as RFC 4180 has it: commas, double quotes, a header line; a quoted field may hold newlines.

Every value is text. A row is only ever cut between records, so the reader counts what the `csv` module pulls.
"""

import csv
import json
from collections.abc import Iterator

from peagle.corpus.lines import MAX_LINE_BYTES, Lines, carriage_returns
from peagle.corpus.rows import RawRow
from peagle.errors import InputError


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
