"""Arrow's extension types: carried whole, the same in every process.

A type that a library registers (Ray's tensors, pandas' periods) is there only in processes that imported it. Such a
column is taken as what it stores; its field keeps Arrow's own marks, by which others have the type again. Types that
Arrow itself brings (`uuid`, `bool8`, tensors) stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)
# Other layouts of the same values, for which Arrow lacks half of its functions; to Parquet they are all one.
_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns without types known to this process alone, and without views."""
    return pa.schema([_converted(column, _as_stored) for column in schema], schema.metadata)


def plain(rows: Rows) -> Rows:
    """Rows under `plain_schema`, without copying them."""
    schema = plain_schema(rows.schema)
    return rows if schema.equals(rows.schema, check_metadata=True) else rows.cast(schema)


def storage_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as what they store, no extension type among them."""
    return pa.schema([_converted(column, _as_storage) for column in schema])


def to_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows in Python: UUIDs and truth values as such, other extensions as stored.

    Raises:
        OverflowError, ValueError: a value that Python does not have.
    """
    stored = storage_schema(batch.schema)
    if not stored.equals(batch.schema):
        batch = batch.cast(stored).cast(pa.schema([_converted(column, _as_uuid_or_bool) for column in batch.schema]))
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def from_values(values: Iterable[Any], type_: pa.DataType) -> pa.Array:
    """The inverse of `to_values`, for one column."""
    column = pa.field("", type_)
    stored = _converted(column, _as_storage).type
    if stored == type_:
        return pa.array(values, type_)
    return pa.array(values, _converted(column, _as_bool).type).cast(stored).cast(type_)


def children(type_: pa.DataType) -> Iterator[pa.Field]:
    """The fields of a nested type; none of another."""
    return (type_.field(index) for index in range(type_.num_fields)) if pa.types.is_nested(type_) else iter(())


def _as_stored(column: pa.Field) -> pa.Field:
    if not isinstance(column.type, pa.ExtensionType):
        return column  # Arrow's own
    marks = {
        b"ARROW:extension:name": column.type.extension_name.encode(),
        b"ARROW:extension:metadata": column.type.__arrow_ext_serialize__(),
    }
    return column.with_type(column.type.storage_type).with_metadata({**(column.metadata or {}), **marks})


def _as_storage(column: pa.Field) -> pa.Field:
    return column.with_type(column.type.storage_type)


def _as_bool(column: pa.Field) -> pa.Field:
    return column.with_type(pa.bool_()) if column.type.extension_name == "arrow.bool8" else _as_storage(column)


def _as_uuid_or_bool(column: pa.Field) -> pa.Field:
    return column if column.type.extension_name == "arrow.uuid" else _as_bool(column)


def _converted(column: pa.Field, convert: Callable[[pa.Field], pa.Field]) -> pa.Field:
    """The column with its extension types converted, at any depth."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = convert(column)
    column = column.with_type(_VIEWS.get(column.type, column.type))
    parts = [_converted(part, convert) for part in children(column.type)]
    return column.with_type(_nested(column.type, parts)) if parts else column


def _nested(type_: pa.DataType, parts: list[pa.Field]) -> pa.DataType:
    """A type like this one, of other parts."""
    kinds: list[tuple[Callable[[pa.DataType], bool], Callable[[], pa.DataType]]] = [
        (pa.types.is_struct, lambda: pa.struct(parts)),
        (pa.types.is_map, lambda: pa.map_(parts[0].type.field(0), parts[0].type.field(1), type_.keys_sorted)),
        (pa.types.is_fixed_size_list, lambda: pa.list_(parts[0], type_.list_size)),
        (pa.types.is_large_list, lambda: pa.large_list(parts[0])),
        (pa.types.is_list_view, lambda: pa.list_view(parts[0])),
        (pa.types.is_large_list_view, lambda: pa.large_list_view(parts[0])),
        (pa.types.is_list, lambda: pa.list_(parts[0])),
    ]
    return next((make() for is_kind, make in kinds if is_kind(type_)), type_)
