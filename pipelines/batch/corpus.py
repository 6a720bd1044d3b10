"""A corpus: its files, columns and rows; and how rows are read back from one range of one file.

It knows Parquet and JSON lines on a local disk. It does not know prompts, units' commits or engines.

JSON lines have no schema, so planning reads the whole corpus once: columns are the union of all keys, numbers widen
(int to float), and a column whose values have no common Arrow type is carried as text: strings as they are, other
values as JSON. A line that is not a JSON object is a row like any other: it gets an id and, later, a dead letter.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from peagle.errors import InputError

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
JSON_TEXT = {b"peagle": b"json"}  # marks a column that is carried as text, other values than strings as JSON
_ROWS_PER_INFERENCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows `first_row ..< first_row + num_rows` of one file; `start` and `end` are their bytes (JSONL only)."""

    path: str
    format: str
    first_row: int
    num_rows: int
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was read: its columns, or the raw text and why it is not a row."""

    columns: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: str | None = None


def discover(uri: str) -> list[Path]:
    """The files of a corpus, sorted by name: a file, a folder (not its sub-folders) or a glob.

    Raises:
        InputError: nothing there, a remote URI, or a suffix that is neither Parquet nor JSONL.
    """
    if "://" in uri:
        raise InputError(f"input {uri!r}: only local files are read", hint="copy the corpus to a local path")
    path = Path(uri).expanduser().absolute()  # workers have other working directories
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in FORMATS and not p.name.startswith("."))
        if not files:
            raise InputError(f"input {uri!r}: the folder holds no {' or '.join(FORMATS)} file")
        return files
    files = [path] if path.is_file() else sorted(Path("/").glob(str(path)[1:]))
    if not files:
        raise InputError(f"input {uri!r}: no such file", hint="give a file, a folder or a quoted glob")
    for file in files:
        if file.suffix not in FORMATS:
            raise InputError(f"input {file}: unknown format {file.suffix!r}", hint=f"known: {', '.join(FORMATS)}")
        if file.stat().st_size == 0:
            raise InputError(f"input {file}: the file is empty")
    return files


def count_rows(files: Sequence[Path]) -> int:
    """Rows of all files, quickly: footers for Parquet, newlines for JSONL (so blank lines count here)."""
    return sum(_parquet(f).metadata.num_rows if _format(f) == "parquet" else _count_lines(f) for f in files)


def scan(files: Sequence[Path], rows_per_span: int, limit: int | None) -> tuple[list[Span], pa.Schema, str]:
    """Cut the files into spans.

    Returns:
        The spans in order, the schema of all columns, and a fingerprint of the content.

    Raises:
        InputError: an unreadable file, Parquet files with different columns, or no row at all.
    """
    spans: list[Span] = []
    schemas: list[pa.Schema] = []
    digest = hashlib.sha256()
    left = limit if limit is not None else 2**63
    for file in files:
        if left <= 0:
            break
        scan_one = _scan_parquet if _format(file) == "parquet" else _scan_jsonl
        file_spans, schema = scan_one(file, rows_per_span, left, digest)
        spans += file_spans
        left -= sum(s.num_rows for s in file_spans)
        schemas.append(schema)
    if not spans:
        raise InputError(f"input {files[0]}: there is no row in it")
    return spans, _unify(schemas, files), digest.hexdigest()


def read(span: Span) -> Iterator[RawRow]:
    """The rows of a span, in order.

    Raises:
        InputError: the file has changed since it was planned.
    """
    rows = _read_parquet(span) if span.format == "parquet" else _read_jsonl(span)
    count = 0
    for row in rows:
        count += 1
        yield row
    if count != span.num_rows:
        raise InputError(
            f"{span.path}: {count} rows where the plan has {span.num_rows}: the file changed after planning",
            hint="put the file back as it was, or start a new run directory",
        )


def to_table(rows: Sequence[RawRow], schema: pa.Schema) -> pa.Table:
    """The rows' columns under the corpus's schema; a bad row is all nulls."""
    arrays = []
    for column in schema:
        values = [row.columns.get(column.name) for row in rows]
        if column.metadata and column.metadata.get(b"peagle") == b"json":
            values = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
        arrays.append(pa.array(values, type=column.type))
    return pa.Table.from_arrays(arrays, schema=schema) if arrays else pa.table({})


def _format(file: Path) -> str:
    return FORMATS[file.suffix]


# --- Parquet


def _parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"input {file}: not readable as Parquet: {error}") from error


def _scan_parquet(file: Path, rows_per_span: int, left: int, digest: Any) -> tuple[list[Span], pa.Schema]:
    parquet = _parquet(file)
    num_rows = min(parquet.metadata.num_rows, left)
    with file.open("rb") as handle:  # the footer holds statistics, sizes and offsets of every column chunk
        handle.seek(-min(file.stat().st_size, 65536), 2)
        digest.update(f"{file.stat().st_size} {num_rows} ".encode() + handle.read())
    spans = [
        Span(path=str(file), format="parquet", first_row=row, num_rows=min(rows_per_span, num_rows - row))
        for row in range(0, num_rows, rows_per_span)
    ]
    return spans, parquet.schema_arrow.remove_metadata()


def _read_parquet(span: Span) -> Iterator[RawRow]:
    parquet = _parquet(Path(span.path))
    row, stop = 0, span.first_row + span.num_rows
    for group in range(parquet.metadata.num_row_groups):
        size = parquet.metadata.row_group(group).num_rows
        first, last = max(row, span.first_row), min(row + size, stop)
        if first < last:
            table = parquet.read_row_group(group).slice(first - row, last - first)
            yield from (RawRow(columns) for columns in table.to_pylist())
        row += size


# --- JSON lines


def _count_lines(file: Path) -> int:
    lines, last = 0, b"\n"
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


def _scan_jsonl(file: Path, rows_per_span: int, left: int, digest: Any) -> tuple[list[Span], pa.Schema]:
    spans: list[Span] = []
    columns = _Columns()
    first_row = rows = start = position = 0
    with file.open("rb") as handle:
        for line in handle:
            position += len(line)
            digest.update(line)
            if not line.strip():
                continue
            columns.add(_parse(line))
            rows += 1
            if rows - first_row == rows_per_span or rows == left:
                spans.append(_jsonl_span(file, first_row, rows, start, position))
                first_row, start = rows, position
            if rows == left:
                break
    if rows > first_row:
        spans.append(_jsonl_span(file, first_row, rows, start, position))
    return spans, columns.schema()


def _jsonl_span(file: Path, first_row: int, stop_row: int, start: int, end: int) -> Span:
    return Span(
        path=str(file),
        format="jsonl",
        first_row=first_row,
        num_rows=stop_row - first_row,
        start=start,
        end=end,
    )


def _read_jsonl(span: Span) -> Iterator[RawRow]:
    try:
        with Path(span.path).open("rb") as handle:
            handle.seek(span.start)
            text = handle.read(span.end - span.start)
    except OSError as error:
        raise InputError(f"input {span.path}: cannot be read: {error}") from error
    for line in text.split(b"\n"):
        if line.strip():
            yield _parse(line)


def _parse(line: bytes) -> RawRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return RawRow(raw=line.decode(errors="replace").rstrip("\r\n"), error=f"not valid JSON: {error}")
    if not isinstance(value, dict):
        return RawRow(
            raw=line.decode(errors="replace").rstrip("\r\n"),
            error=f"a JSON {type(value).__name__}, not an object",
        )
    return RawRow(value)


class _Columns:
    """The Arrow schema that fits every row added so far, with bounded memory."""

    def __init__(self) -> None:
        self._fields: dict[str, pa.Field] = {}
        self._pending: list[dict[str, Any]] = []

    def add(self, row: RawRow) -> None:
        self._pending.append(row.columns)
        if len(self._pending) == _ROWS_PER_INFERENCE:
            self._infer()

    def schema(self) -> pa.Schema:
        self._infer()
        # A column that is null in every row has no type to widen to later: text can hold any.
        return pa.schema(
            [pa.field(f.name, pa.string()) if pa.types.is_null(f.type) else f for f in self._fields.values()]
        )

    def _infer(self) -> None:
        for name in dict.fromkeys(key for row in self._pending for key in row):
            inferred = _infer_field(name, [row.get(name) for row in self._pending])
            self._fields[name] = _widen(self._fields[name], inferred) if name in self._fields else inferred
        self._pending.clear()


def _infer_field(name: str, values: list[Any]) -> pa.Field:
    try:
        return pa.field(name, pa.array(values).type)
    except (pa.ArrowException, OverflowError):
        return pa.field(name, pa.string(), metadata=JSON_TEXT)


def _widen(a: pa.Field, b: pa.Field) -> pa.Field:
    if a.metadata or b.metadata:
        return pa.field(a.name, pa.string(), metadata=JSON_TEXT)
    try:
        return pa.unify_schemas([pa.schema([a]), pa.schema([b])], promote_options="permissive").field(0)
    except pa.ArrowException:
        return pa.field(a.name, pa.string(), metadata=JSON_TEXT)


def _unify(schemas: list[pa.Schema], files: Sequence[Path]) -> pa.Schema:
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for column in schema:
            fields[column.name] = _widen(fields[column.name], column) if column.name in fields else column
    if not fields:
        raise InputError(f"input {files[0]}: no row in it is a JSON object", hint="one object a line, as in JSON Lines")
    return pa.schema(list(fields.values()))
