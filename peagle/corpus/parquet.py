"""Parquet corpora: cut files into spans by their footer, compute fingerprints, and read rows."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from peagle.corpus.extensions import cast_to_plain, from_values, plain_schema, storage_schema, to_values
from peagle.corpus.files import ForwardReaders, SourceFile, open_raw, read_errors_as_input_error
from peagle.corpus.rows import RawRow, Span, WorkEstimate
from peagle.corpus.schema import (
    LARGEST_EXACT,
    changed_in_python,
    duplicate_name,
    has_long_integers,
    has_nanosecond_times,
    leaf_types,
    loses_nanoseconds,
    mark_wide,
)
from peagle.errors import InputError

_BATCH_ROWS = 1024
_FOOTER_BYTES = 65536
_VALUE_ERRORS = (OverflowError, ValueError)  # raised for the year 10000, and for text that is not UTF-8


def count_parquet(file: SourceFile) -> int:
    with _open(file.path) as parquet:
        return int(parquet.metadata.num_rows)


def scan_parquet(
    file: SourceFile,
    sizes: Iterator[int],
    max_rows: int,
    digest: Any,
    estimate: WorkEstimate,
    *,
    old_digest: bool = False,
) -> tuple[list[Span], pa.Schema]:
    """Cut a file into spans, and update `digest` with its content.

    Raises InputError if the file is not valid Parquet, or has a column of an unsupported type.

    Args:
        sizes: number of rows of each span.
        old_digest: update `digest` as in older plans.
    """
    with _open(file.path) as parquet:
        _require_readable(file.path, parquet)
        num_rows = min(parquet.metadata.num_rows, max_rows)
        schema = plain_schema(_exact_schema(file.path, parquet).remove_metadata())
        # Remove the metadata that peagle adds to files that a run writes.
        metadata = [{k: v for k, v in (column.metadata or {}).items() if k != b"peagle"} for column in schema]
        schema = pa.schema(
            [column.with_metadata(user_metadata) for column, user_metadata in zip(schema, metadata, strict=True)]
        )
        groups = [parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups)]
        storage_columns = storage_schema(schema)
        schema = pa.schema(
            [
                mark_wide(column) if _might_be_wide(stored, groups) else column
                for column, stored in zip(schema, storage_columns, strict=True)
            ]
        )
    with read_errors_as_input_error(file.path), open_raw(file.path) as handle:
        if old_digest:  # reads only the footer, so it misses some edits that do not change the length
            handle.seek(-min(file.size, _FOOTER_BYTES), 2)
            digest.update(f"{file.size} {num_rows} ".encode() + handle.read())
        else:
            digest.update(f"{num_rows} ".encode() + hashlib.file_digest(handle, "sha256").digest())
    # Cumulative rows and bytes at the end of each row group; bytes in between are interpolated.
    end_rows = np.cumsum([0, *(group.num_rows for group in groups if group.num_rows)])
    end_bytes = np.cumsum([0, *(group.total_byte_size for group in groups if group.num_rows)])
    spans: list[Span] = []
    row = 0
    while row < num_rows:
        size = min(next(sizes), num_rows - row)
        first_byte, last_byte = np.interp([row, row + size], end_rows, end_bytes)
        work = estimate.of_rows(size, float(last_byte - first_byte))
        spans.append(Span(path=file.path, format="parquet", first_row=row, num_rows=size, work=work))
        row += size
    return spans, schema


def read_parquet(span: Span) -> Iterator[RawRow]:
    """Yield the rows of a span; raises InputError if the file is not valid Parquet."""
    reader = _readers.take(span.path, span.first_row) or _ForwardParquet(span.path, span.first_row)
    reader.skip_to(span.first_row)
    yield from reader.rows(span.num_rows)
    _readers.put_back(span.path, reader)


def read_parquet_file(file: SourceFile) -> Iterator[RawRow]:
    """Yield all rows of a file; raises the errors of `scan_parquet`."""
    with _open(file.path) as parquet:
        _require_readable(file.path, parquet)
        num_rows = parquet.metadata.num_rows
    reader = _ForwardParquet(file.path, 0)
    try:
        yield from reader.rows(num_rows)
    finally:
        reader.close()


def _require_readable(path: str, parquet: pq.ParquetFile) -> None:
    """Raise InputError for columns whose values cannot be converted to Python without loss."""
    schema = storage_schema(parquet.schema_arrow)
    if name := duplicate_name(schema):
        raise InputError(f"input {path}: there are two columns {name!r}", hint="give each column a different name")
    for column in filter(lambda column: has_nanosecond_times(column.type), schema):
        with _parquet_errors(path):
            batches = parquet.iter_batches(_BATCH_ROWS, columns=[column.name])
            is_lossy = any(loses_nanoseconds(batch.column(column.name).cast(column.type)) for batch in batches)
        if is_lossy:
            raise InputError(
                f"input {path}: column {column.name!r} has times of day in nanoseconds; rows hold microseconds",
                hint="convert that column to microseconds or text",
            )
    for column in _unsupported_columns(path, parquet):
        raise InputError(
            f"input {path}: column {column.name!r} is a {column.type}, which rows cannot hold",
            hint="convert that column to another type, or drop it",
        )


def _exact_schema(path: str, parquet: pq.ParquetFile) -> pa.Schema:
    """Return the file's schema, with nanoseconds in INT96 columns that need them.

    Raises InputError if such a column also has a value outside the range of nanosecond timestamps.
    """
    schema = parquet.schema_arrow
    for name in _int96_columns(parquet):
        needs_nanoseconds, range_error = False, ""
        with _nanosecond_batches(path, [name]) as fine_batches:
            for coarse, fine in zip(parquet.iter_batches(_BATCH_ROWS, columns=[name]), fine_batches, strict=True):
                nanosecond_field = fine.schema.field(name)
                needs_nanoseconds = needs_nanoseconds or not _is_same(coarse.column(name), fine.column(name))
                try:
                    coarse.column(name).cast(nanosecond_field.type)
                except pa.ArrowInvalid as error:
                    range_error = range_error or str(error)
        if needs_nanoseconds and range_error:
            raise InputError(
                f"input {path}: column {name!r} (INT96) needs nanoseconds, but has a value out of range: {range_error}",
                hint="convert that column to microseconds (Spark: outputTimestampType=TIMESTAMP_MICROS)",
            )
        if needs_nanoseconds:
            schema = schema.set(schema.get_field_index(name), nanosecond_field)
    return schema


def _int96_columns(parquet: pq.ParquetFile) -> list[str]:
    """Return columns with 96-bit timestamps, which Spark, Hive and Impala write."""
    names, end = [], 0
    for column in storage_schema(parquet.schema_arrow):
        start, end = end, end + len(list(leaf_types(column.type)))
        if any(parquet.schema.column(leaf).physical_type == "INT96" for leaf in range(start, end)):
            names.append(column.name)
    return names


@contextlib.contextmanager
def _nanosecond_batches(path: str, columns: list[str], **options: Any) -> Iterator[Iterator[pa.RecordBatch]]:
    """Read INT96 columns in nanoseconds, in which times outside of 1677 to 2262 wrap around."""
    with pq.ParquetFile(open_raw(path) if "://" in path else path) as parquet:
        yield parquet.iter_batches(_BATCH_ROWS, columns=columns, **options)


def _is_same(coarse: pa.Array, fine: pa.Array) -> bool:
    # The unsafe cast wraps around, as reading in nanoseconds does.
    return bool(coarse.cast(fine.type, safe=False).equals(fine))


def _exact_batches(path: str, parquet: pq.ParquetFile, groups: list[int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups. INT96 columns are in nanoseconds only in batches that need them."""
    batches, names = parquet.iter_batches(_BATCH_ROWS, row_groups=groups), _int96_columns(parquet)
    if not names:
        yield from batches
        return
    with _nanosecond_batches(path, names, row_groups=groups) as fine_batches:
        for batch, fine in zip(batches, fine_batches, strict=True):
            for name in names:
                if not _is_same(batch.column(name), fine.column(name)):
                    index = batch.schema.get_field_index(name)
                    batch = batch.set_column(index, fine.schema.field(name), fine.column(name))
            yield batch


def _unsupported_columns(path: str, parquet: pq.ParquetFile) -> Iterator[pa.Field]:
    """Yield columns that cannot be converted, because Arrow lacks functions for their types. Tries the first row."""
    with _parquet_errors(path):
        first_row: pa.RecordBatch | None = next(parquet.iter_batches(1), None)
    if first_row is None:
        return
    for column in first_row.schema:
        try:
            rows = cast_to_plain(first_row.select([column.name]))
            values = [row[column.name] for row in to_values(rows)]
            pa.table({column.name: from_values(values, rows.schema.field(0).type)}).take([0])
        except (pa.ArrowException, NotImplementedError, TypeError):
            yield column
        except _VALUE_ERRORS:
            continue  # only this row has an error


def _might_be_wide(column: pa.Field, groups: list[Any]) -> bool:
    """Whether a column might have integers that a double cannot hold exactly, by its statistics."""
    if not has_long_integers(column.type):
        return False
    for group in groups:
        for chunk in map(group.column, range(group.num_columns)):
            if not chunk.path_in_schema.startswith(column.name) or chunk.physical_type != "INT64":
                continue
            statistics = chunk.statistics
            if statistics is None:
                return True
            if statistics.has_min_max:
                ends = statistics.min, statistics.max
                if isinstance(statistics.min, int) and max(map(abs, ends)) > LARGEST_EXACT:
                    return True
            elif statistics.null_count != chunk.num_values:
                return True
    return False


class _ForwardParquet:
    """Reads the rows of a file forward from a given row. `position` is the index of the next row."""

    def __init__(self, path: str, first_row: int) -> None:
        self._path = path
        self._parquet = _open(path)
        self.position, first_group = 0, 0
        for group in range(self._parquet.metadata.num_row_groups):
            size = self._parquet.metadata.row_group(group).num_rows
            if self.position + size > first_row:
                break
            self.position, first_group = self.position + size, group + 1
        groups = list(range(first_group, self._parquet.metadata.num_row_groups))
        self._batches = _exact_batches(path, self._parquet, groups)
        self._batch: pa.RecordBatch | None = None

    def skip_to(self, row: int) -> None:
        """Skip rows without creating Python objects."""
        for _ in self._pieces(row - self.position):
            pass

    def rows(self, num_rows: int) -> Iterator[RawRow]:
        """Yield the next rows, or fewer at the end of the file. A row with an unreadable value has an error."""
        for piece in self._pieces(num_rows):
            try:
                rows = [RawRow(columns) for columns in _values(piece)]
            except _VALUE_ERRORS:
                first = self.position - piece.num_rows
                rows = [_row(piece.slice(n, 1), f"{self._path} row {first + n}") for n in range(piece.num_rows)]
            yield from rows

    def close(self) -> None:
        self._parquet.close(force=True)

    def _pieces(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the next rows in batches, and advance `position`."""
        while num_rows > 0:
            if self._batch is None or not self._batch.num_rows:
                with _parquet_errors(self._path):
                    self._batch = next(map(cast_to_plain, self._batches), None)
            if self._batch is None:
                return
            piece = self._batch.slice(0, num_rows)
            self._batch = self._batch.slice(piece.num_rows)
            self.position += piece.num_rows
            num_rows -= piece.num_rows
            yield piece


_readers: ForwardReaders[_ForwardParquet] = ForwardReaders()


def _values(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows as `to_values` does, but raise ValueError for values that Python would change."""
    for column in rows.cast(storage_schema(rows.schema)).columns:
        if changed := changed_in_python(column):
            raise ValueError(changed)
    return to_values(rows)


def _row(piece: pa.RecordBatch, where: str) -> RawRow:
    """Return the row of a one-row batch, with its readable columns. `where` names the file and the row."""
    columns: dict[str, Any] = {}
    first_error = None
    for column in piece.schema:
        try:
            columns |= _values(piece.select([column.name]))[0]
        except _VALUE_ERRORS as error:
            if first_error is None:
                message = f"column {column.name!r}, a {column.type}, cannot be read: {error}"
                first_error = f"{where} (counted from 0): {message}"
    return RawRow(columns, error=first_error)


def _open(path: str) -> pq.ParquetFile:
    with _parquet_errors(path):
        file = open_raw(path) if "://" in path else path
        return pq.ParquetFile(file, coerce_int96_timestamp_unit="us")


@contextlib.contextmanager
def _parquet_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"input {path}: not readable as Parquet: {error}") from error
