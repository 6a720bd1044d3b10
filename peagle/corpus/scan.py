"""Scan a corpus for its columns, rows and repeated ids, cut it into spans, and read the rows of a span.

Text formats have no schema, so planning reads the whole corpus once; memory grows with spans, not with rows. Parquet
files have row counts in their footers, so the rest is only read for the fingerprint. Invalid rows are not refused
during planning; they become dead letters later.
"""

import contextlib
import hashlib
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from peagle.corpus.cutting import Cut
from peagle.corpus.files import SourceFile, discover, write_note
from peagle.corpus.lines import Lines
from peagle.corpus.parquet import count_parquet, read_parquet, read_parquet_file, scan_parquet
from peagle.corpus.rows import RawRow, Span, WorkEstimate
from peagle.corpus.schema import ColumnTypes, unify_schemas
from peagle.corpus.text import BATCH_SCHEMA, Record, first_object, is_batch, parse_records, read_records
from peagle.errors import InputError

_BUCKETS = 256
_IN_MEMORY_BYTES = 1 << 16  # per bucket; 16 MiB in total
_ENTRY = struct.Struct("<16sQQ")
_Occurrences = tuple[tuple[int, int], tuple[int, int]]
"""File and line of both occurrences of an id."""


class UniqueIds:
    """Finds repeated ids. Their 16-byte hashes are in 256 temporary files, each small enough to sort."""

    def __init__(self) -> None:
        # __exit__ closes them.
        self._buckets = [tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) for _ in range(_BUCKETS)]  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bucket in self._buckets:
            bucket.close()

    def add(self, value: str, file: int, line: int) -> None:
        """Add an id with the index of its file and the number of its line."""
        digest = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=16).digest()
        self._buckets[digest[0]].write(_ENTRY.pack(digest, file, line))

    def first_repeated(self) -> _Occurrences | None:
        """Return the file and line of both occurrences of the first repeated id, or None."""
        pairs = [pair for bucket in self._buckets if (pair := self._repeated_in(bucket))]
        return min(pairs, key=lambda pair: pair[1], default=None)

    @staticmethod
    def _repeated_in(bucket: "tempfile.SpooledTemporaryFile[bytes]") -> _Occurrences | None:
        """Return the first repeated id of a bucket, or None."""
        bucket.seek(0)
        entries = np.frombuffer(bucket.read(), dtype=[(name, "<u8") for name in ("high", "low", "file", "line")])
        sorted_indices = np.lexsort((entries["line"], entries["file"], entries["low"], entries["high"]))
        entry, next_entry = entries[sorted_indices[:-1]], entries[sorted_indices[1:]]
        is_same = (entry["high"] == next_entry["high"]) & (entry["low"] == next_entry["low"])
        columns = ["file", "line"]
        pairs = zip(entry[is_same][columns].tolist(), next_entry[is_same][columns].tolist(), strict=True)
        return min(pairs, key=lambda pair: pair[1], default=None)


_VERSION_PREFIX = "2:"  # prefix of fingerprints; older ones have none, and only cover the footers of Parquet files


def find_files(
    uri: str, input_format: str = "auto", *, exclude: str | None = None, announce: Callable[[str], None] = write_note
) -> list[SourceFile]:
    """Find a corpus's files with their formats. JSON lines that start with an OpenAI batch request are a batch.

    Parameters and errors are those of `discover`. A batch together with other files is also an error.
    """
    files = discover(uri, input_format, exclude=exclude, announce=announce)
    if input_format == "auto":
        files = [replace(f, format="openai-batch") if f.format == "jsonl" and _begins_as_batch(f) else f for f in files]
    files_by_format = {file.format: file for file in reversed(files)}
    if "openai-batch" in files_by_format and len(files_by_format) > 1:
        (other, *_) = (file for name, file in files_by_format.items() if name != "openai-batch")
        raise InputError(
            f"input {other.path} is not an OpenAI batch, but {files_by_format['openai-batch'].path} is",
            hint="use two runs, or set --input-format",
        )
    return files


def count_rows(files: Sequence[SourceFile], at_most: int) -> int:
    """Count rows quickly, up to `at_most`, from Parquet footers and from lines, including blank lines."""
    num_rows = 0
    for file in files:
        if file.format == "parquet":
            num_rows += count_parquet(file)
        else:
            num_rows += _count_lines(file, at_most - num_rows)
        if num_rows >= at_most:
            return at_most
    return num_rows


def scan(
    files: Sequence[SourceFile],
    cut: Cut,
    limit: int | None,
    estimate: WorkEstimate,
    *,
    earlier_fingerprint: str | None = None,
) -> tuple[list[Span], pa.Schema, str]:
    """Cut the files into spans with estimated work; return them with the schema of all columns and a fingerprint.

    Args:
        earlier_fingerprint: a fingerprint to compare with; the new one has the same version.

    Raises:
        InputError: an unreadable file, no valid row, or a batch with a repeated custom_id.
    """
    spans: list[Span] = []
    schemas: list[pa.Schema] = []
    digest = hashlib.sha256()
    prefix = _VERSION_PREFIX if earlier_fingerprint is None or earlier_fingerprint.startswith(_VERSION_PREFIX) else ""
    span_sizes = cut.sizes()
    rows_left = limit if limit is not None else 2**63
    num_valid, first_error = 0, None
    with UniqueIds() as ids:
        for index, file in enumerate(files):
            if rows_left <= 0:
                break
            digest.update(f"{file.format} ".encode())
            if file.format == "parquet":
                file_spans, schema = scan_parquet(file, span_sizes, rows_left, digest, estimate, old_digest=not prefix)
                num_valid += sum(s.num_rows for s in file_spans)
            else:
                text_scan = _TextScan(file, index, ids, estimate)
                file_spans, schema = text_scan.run(span_sizes, rows_left, digest)
                num_valid, first_error = num_valid + text_scan.num_valid, first_error or text_scan.first_error
            spans += file_spans
            rows_left -= sum(s.num_rows for s in file_spans)
            schemas.append(schema)
        if repeated := ids.first_repeated():
            (first_file, first_line), (second_file, second_line) = repeated
            raise InputError(
                f"input {files[second_file].path} line {second_line}: its custom_id is also in"
                f" {files[first_file].path} line {first_line}",
                hint="each request of a batch needs a unique custom_id",
            )
    if not spans:
        raise InputError(f"input {files[0].path}: it has no rows")
    schema = unify_schemas(schemas)
    if not num_valid or not len(schema):
        raise InputError(f"input: no row is valid; first error: {first_error or 'every row is an empty object'}")
    return spans, schema, prefix + digest.hexdigest()


def read_span(span: Span) -> Iterator[RawRow]:
    """Yield the rows of a span, in order; raises InputError if the file has changed since planning."""
    count = 0
    for row in read_parquet(span) if span.format == "parquet" else read_records(span):
        count += 1
        yield row
    if count != span.num_rows:
        raise InputError(
            f"{span.path}: {count} rows, but the plan has {span.num_rows}: the file changed after planning",
            hint="restore the file, or start a new run directory",
        )


def read_all(files: Sequence[SourceFile]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all files; raises InputError if a file cannot be read, or a row is invalid."""
    for file in files:
        for row in read_parquet_file(file) if file.format == "parquet" else _read_text(file):
            if row.error is not None:
                raise InputError(f"input {row.error}", hint="correct or remove that row")
            yield row.columns


def _read_text(file: SourceFile) -> Iterator[RawRow]:
    with contextlib.closing(Lines(file.path)) as lines:
        yield from (record.row for record in parse_records(file.format, lines))


class _TextScan:
    """A pass over a text file that finds its spans, its columns, and the ids of a batch."""

    def __init__(self, file: SourceFile, index: int, ids: UniqueIds, estimate: WorkEstimate) -> None:
        self._file = file
        self._index = index
        self._ids = ids
        self._estimate = estimate
        self._is_batch = file.format == "openai-batch"
        self._columns = ColumnTypes()
        self.num_valid = 0
        self.first_error: str | None = None

    def run(self, span_sizes: Iterator[int], max_rows: int, digest: Any) -> tuple[list[Span], pa.Schema]:
        """Return the spans and the schema of the file, and update `digest` with its lines."""
        spans: list[Span] = []
        first_row = 0
        with contextlib.closing(Lines(self._file.path)) as lines:
            lines.on_line = digest.update
            rows = parse_records(self._file.format, lines)
            while first_row < max_rows and (span := self._next_span(rows, lines, first_row, max_rows, span_sizes)):
                spans.append(span)
                first_row += span.num_rows
        return spans, BATCH_SCHEMA if self._is_batch else self._columns.schema()

    def _next_span(
        self, rows: Iterator[Record], lines: Lines, first_row: int, max_rows: int, span_sizes: Iterator[int]
    ) -> Span | None:
        """Return the next span; None at the end of the file."""
        start, first_line, header = lines.position, lines.number, ""  # the first span of a CSV file includes the header
        num_rows = work = max_span_rows = 0
        previous_position = start
        for record in rows:
            max_span_rows = max_span_rows or min(next(span_sizes), max_rows - first_row)
            header, num_rows = record.header, num_rows + 1
            work += self._estimate.of_row(record.row, lines.position - previous_position)
            previous_position = lines.position
            self._add(record)
            if num_rows == max_span_rows:
                break
        if not num_rows:
            return None
        return Span(
            path=self._file.path,
            format=self._file.format,
            first_row=first_row,
            num_rows=num_rows,
            start=start,
            end=lines.position,
            line=first_line,
            header=header,
            work=work,
        )

    def _add(self, record: Record) -> None:
        row = record.row
        if row.error is None:
            self.num_valid += 1
        elif self.first_error is None:
            self.first_error = row.error
        if not self._is_batch:
            self._columns.add(row)
        elif isinstance(custom_id := row.columns.get("custom_id"), str):
            self._ids.add(custom_id, self._index, record.line)


def _begins_as_batch(file: SourceFile) -> bool:
    with contextlib.closing(Lines(file.path)) as lines:
        return is_batch(first_object(lines) or {})


def _count_lines(file: SourceFile, at_most: int) -> int:
    with contextlib.closing(Lines(file.path)) as lines:
        for _ in lines:
            if lines.number > at_most:
                break
        return lines.number - 1
