"""Infer column types of rows without a schema, in one pass with bounded memory; check what Parquet and Python can hold.

Columns are the union of all keys, and numbers widen (int to float if no integer loses precision). A column becomes text
if its values have no common Arrow type, or one that Parquet cannot store; values other than strings become JSON.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from peagle.corpus.extensions import child_fields, from_values, storage_schema
from peagle.corpus.rows import RawRow
from peagle.plain_json import to_json

_MAX_DEPTH = 100  # maximum levels of nesting in Parquet
_NANOSECOND_TIME = pa.time64("ns")
_NOT_A_TIME = -(2**63)  # NaT in pandas
_UNITS_PER_DAY = {"s": 86_400, "ms": 86_400 * 10**3, "us": 86_400 * 10**6, "ns": 86_400 * 10**9}
LARGEST_EXACT = 2**53  # up to here, a double holds all integers exactly


def can_be_stored(schema: pa.Schema) -> bool:
    """Whether Parquet can store these columns; it cannot store empty structs and deeply nested types."""
    sink = io.BytesIO()
    try:
        pq.write_table(storage_schema(schema).empty_table(), sink)
        pq.read_schema(io.BytesIO(sink.getvalue()))
    except (OSError, pa.ArrowException):
        return False
    return True


def is_too_deep(type_: pa.DataType) -> bool:
    """Whether a type has too many levels for Parquet."""
    # Not recursive, because the type may have more levels than Python's stack.
    level = [type_]
    for _ in range(_MAX_DEPTH):
        level = [field.type for nested in level for field in child_fields(nested)]
        if not level:
            return False
    return True


def can_hold(new: pa.DataType, old: pa.DataType, *, wide: bool) -> bool:
    """Whether `new`, the type to which Arrow would widen `old`, holds all values of `old`.

    `wide` means that `old` may have integers beyond `LARGEST_EXACT`.
    """
    if new == old or pa.types.is_null(old):
        return True
    if pa.types.is_nested(new):
        parts = {field.name: field.type for field in child_fields(new)}
        pairs = [(parts.get(field.name), field.type) for field in child_fields(old)]
        if not pa.types.is_struct(new):  # names of list items do not matter
            pairs = list(zip(parts.values(), (part for _, part in pairs), strict=False))
        return all(part is not None and can_hold(part, old_part, wide=wide) for part, old_part in pairs)
    if pa.types.is_integer(old):
        return not (wide and old.bit_width == 64)
    if pa.types.is_decimal(old):
        return bool(pa.types.is_decimal(new))
    # Timestamps in nanoseconds only hold the years 1678 to 2261; some data uses the year 9999 for "never".
    return not (pa.types.is_temporal(old) and getattr(new, "unit", None) == "ns" and not pa.types.is_time(new))


def is_wide(array: pa.Array | pa.ChunkedArray) -> bool:
    """Whether an array contains integers beyond `LARGEST_EXACT`, at any depth."""
    if isinstance(array, pa.ChunkedArray):
        return any(map(is_wide, array.chunks))
    if pa.types.is_integer(array.type) and array.type.bit_width == 64:
        extremes = pc.min_max(array).as_py()
        return any(value is not None and abs(value) > LARGEST_EXACT for value in extremes.values())
    if pa.types.is_struct(array.type):
        return any(map(is_wide, array.flatten()))
    return bool(pa.types.is_list(array.type)) and is_wide(array.flatten())


def has_long_integers(type_: pa.DataType) -> bool:
    """Whether a type contains 64-bit integers, at any depth."""
    return any(pa.types.is_integer(leaf) and leaf.bit_width == 64 for leaf in leaf_types(type_))


def has_nanosecond_times(type_: pa.DataType) -> bool:
    """Whether a type contains times of day in nanoseconds, at any depth."""
    return any(leaf == _NANOSECOND_TIME for leaf in leaf_types(type_))


def loses_nanoseconds(array: pa.Array) -> bool:
    """Whether an array contains times of day with fractions of a microsecond, which Python cannot represent."""
    times = (leaf for leaf in _leaf_arrays(array) if leaf.type == _NANOSECOND_TIME)
    return any(not leaf.equals(leaf.cast(pa.time64("us"), safe=False).cast(_NANOSECOND_TIME)) for leaf in times)


def changed_in_python(array: pa.Array) -> str | None:
    """Describe a value that Python would silently change, or return None.

    Python wraps a time of day outside of 00:00 to 24:00. Pandas reads the smallest 64-bit integer as null.
    """
    for leaf in _leaf_arrays(array):
        unit = getattr(leaf.type, "unit", "")
        if pa.types.is_time(leaf.type):
            first, last = _smallest_and_largest(leaf)
            if first is not None and last is not None and not 0 <= first <= last < _UNITS_PER_DAY[unit]:
                return f"{first if first < 0 else last} {unit} is not a time of day"
        elif pa.types.is_temporal(leaf.type) and unit == "ns" and _smallest_and_largest(leaf)[0] == _NOT_A_TIME:
            return f"{_NOT_A_TIME} ns is NaT (not a time) in pandas"
    return None


def _smallest_and_largest(array: pa.Array) -> tuple[int | None, int | None]:
    extremes = pc.min_max(array.view(pa.int32() if array.type.bit_width == 32 else pa.int64()))
    return extremes["min"].as_py(), extremes["max"].as_py()


def _leaf_arrays(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the leaves of a nested array, or the array itself."""
    if pa.types.is_struct(array.type):
        parts = array.flatten()
    elif pa.types.is_map(array.type):
        parts = [array.keys, array.items]
    elif pa.types.is_nested(array.type):
        parts = [array.flatten()]
    else:
        yield array
        return
    for part in parts:
        yield from _leaf_arrays(part)


def duplicate_name(fields: Iterable[pa.Field]) -> str | None:
    """Return a name that two fields share at the same level, at any depth, or None."""
    seen: set[str] = set()
    for field in fields:
        name: str = field.name
        if name in seen:
            return name
        seen.add(name)
        if inner := duplicate_name(child_fields(field.type)):
            return f"{name}.{inner}"
    return None


def leaf_types(type_: pa.DataType) -> Iterator[pa.DataType]:
    """Yield the leaf types of a nested type in order, or the type itself."""
    if not pa.types.is_nested(type_):
        yield type_
    for field in child_fields(type_):
        yield from leaf_types(field.type)


JSON_TEXT = {b"peagle": b"json"}  # metadata of a text column with values other than strings as JSON
_WIDE = {b"peagle": b"wide"}  # metadata of a column with integers beyond LARGEST_EXACT, only during planning
_ROWS_PER_INFERENCE = 4096


class ColumnTypes:
    """Infers the Arrow schema that fits every added row."""

    def __init__(self) -> None:
        self._fields: dict[str, pa.Field] = {}
        self._pending: list[dict[str, Any]] = []

    def add(self, row: RawRow) -> None:
        """Add a row; an invalid row has no columns."""
        self._pending.append({} if row.error else row.columns)
        if len(self._pending) == _ROWS_PER_INFERENCE:
            self._infer()

    def schema(self) -> pa.Schema:
        self._infer()
        # A column of nulls becomes text, which can hold other files' values.
        return pa.schema(
            [pa.field(f.name, pa.string()) if pa.types.is_null(f.type) else f for f in self._fields.values()]
        )

    def _infer(self) -> None:
        for name in dict.fromkeys(key for row in self._pending for key in row):
            try:
                array = pa.array([row.get(name) for row in self._pending])
            except (pa.ArrowException, OverflowError):
                array = None
            if array is None or is_too_deep(array.type):
                inferred = json_text(name)
            else:
                inferred = pa.field(name, array.type)
                inferred = mark_wide(inferred) if is_wide(array) else inferred
            self._fields[name] = common_column(self._fields[name], inferred) if name in self._fields else inferred
        self._pending.clear()


def json_text(name: str) -> pa.Field:
    """Return a text column for arbitrary values as JSON."""
    return pa.field(name, pa.string(), metadata=JSON_TEXT)


def common_column(a: pa.Field, b: pa.Field) -> pa.Field:
    """Return a column that can hold the values of both columns."""
    if _is_json(a) or _is_json(b):
        return json_text(a.name)
    try:
        common = pa.unify_schemas([pa.schema([a]), pa.schema([b])], promote_options="permissive").field(0)
    except pa.ArrowException:
        return json_text(a.name)
    if not all(can_hold(common.type, column.type, wide=_is_wide(column)) for column in (a, b)):
        return json_text(a.name)
    return mark_wide(common) if _is_wide(a) or _is_wide(b) else common


def mark_wide(column: pa.Field) -> pa.Field:
    """Mark a column as having integers beyond a double's precision."""
    return column.with_metadata({**(column.metadata or {}), **_WIDE})


def unify_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return the columns of several files, in types that Parquet can store."""
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for column in schema:
            fields[column.name] = common_column(fields[column.name], column) if column.name in fields else column
    return pa.schema([_final_column(column) for column in fields.values()])


def to_table(rows: Sequence[RawRow], schema: pa.Schema) -> pa.Table:
    """Return the rows' columns in the corpus's schema; an invalid row is all nulls."""
    arrays = []
    for column in schema:
        values = [None if row.error else row.columns.get(column.name) for row in rows]
        if _is_json(column):
            values = [v if v is None or isinstance(v, str) else to_json(v, non_finite="keep") for v in values]
        arrays.append(from_values(values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema) if arrays else pa.table({})


def _final_column(column: pa.Field) -> pa.Field:
    """Return a column as the output stores it. It is nullable, because some files may not have it."""
    if _is_json(column) or (pa.types.is_nested(column.type) and not can_be_stored(pa.schema([column]))):
        return json_text(column.name)
    if _is_wide(column):
        column = column.with_metadata({key: value for key, value in column.metadata.items() if key not in _WIDE})
    return column.with_nullable(True)


def _is_json(column: pa.Field) -> bool:
    return bool(column.metadata) and JSON_TEXT.items() <= column.metadata.items()


def _is_wide(column: pa.Field) -> bool:
    return bool(column.metadata) and _WIDE.items() <= column.metadata.items()
