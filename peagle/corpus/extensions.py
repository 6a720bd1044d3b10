"""Convert Arrow's extension types, so that a schema is the same in every process.

A type that a library registers (Ray's tensors, pandas' periods) only exists in processes that imported the library.
Such a column becomes its storage type, and its field keeps Arrow's metadata, from which the type can be restored.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)
# Views are another layout of the same values. Parquet does not distinguish them, and Arrow has few functions for them.
_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema without views, and without types that are registered only in this process."""
    return pa.schema([_converted(column, _as_marked_storage) for column in schema], schema.metadata)


def cast_to_plain(rows: Rows) -> Rows:
    """Convert rows to `plain_schema`, without copying."""
    schema = plain_schema(rows.schema)
    return rows if schema.equals(rows.schema, check_metadata=True) else rows.cast(schema)


def storage_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema of storage types, without extension types."""
    return pa.schema([_converted(column, _as_storage) for column in schema])


def to_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as Python values. Of the extension types, only UUIDs and booleans become Python's own types."""
    stored_schema = storage_schema(batch.schema)
    if not stored_schema.equals(batch.schema):
        batch = batch.cast(stored_schema).cast(
            pa.schema([_converted(column, _as_uuid_or_bool) for column in batch.schema])
        )
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def from_values(values: Iterable[Any], type_: pa.DataType) -> pa.Array:
    """Inverse of `to_values`, for one column."""
    column = pa.field("", type_)
    storage_type = _converted(column, _as_storage).type
    if storage_type == type_:
        return pa.array(values, type_)
    return pa.array(values, _converted(column, _as_bool).type).cast(storage_type).cast(type_)


def child_fields(type_: pa.DataType) -> Iterator[pa.Field]:
    """Return the fields of a nested type; empty for other types."""
    return (type_.field(index) for index in range(type_.num_fields)) if pa.types.is_nested(type_) else iter(())


def _as_marked_storage(column: pa.Field) -> pa.Field:
    if not isinstance(column.type, pa.ExtensionType):  # Arrow's own, which every process knows
        return column
    extension_metadata = {
        b"ARROW:extension:name": column.type.extension_name.encode(),
        b"ARROW:extension:metadata": column.type.__arrow_ext_serialize__(),
    }
    return column.with_type(column.type.storage_type).with_metadata({**(column.metadata or {}), **extension_metadata})


def _as_storage(column: pa.Field) -> pa.Field:
    return column.with_type(column.type.storage_type)


def _as_bool(column: pa.Field) -> pa.Field:
    return column.with_type(pa.bool_()) if column.type.extension_name == "arrow.bool8" else _as_storage(column)


def _as_uuid_or_bool(column: pa.Field) -> pa.Field:
    return column if column.type.extension_name == "arrow.uuid" else _as_bool(column)


def _converted(column: pa.Field, convert: Callable[[pa.Field], pa.Field]) -> pa.Field:
    """Convert the extension types of a column, at any depth."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = convert(column)
    column = column.with_type(_VIEWS.get(column.type, column.type))
    parts = [_converted(part, convert) for part in child_fields(column.type)]
    return column.with_type(_nested(column.type, parts)) if parts else column


def _nested(type_: pa.DataType, parts: list[pa.Field]) -> pa.DataType:
    """Return a nested type of the same kind with other parts."""
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
