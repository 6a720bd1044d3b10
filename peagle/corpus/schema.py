"""The columns of rows that carry no schema: one Arrow type for each, found in one pass with bounded memory.

Columns are the union of all keys, numbers widen (int to float, where none is too large to be exact), and a column
whose values have no common Arrow type, or none that Parquet can hold, is carried as text: strings as they are, other
values as JSON. It knows no file and no format.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from peagle.corpus.extensions import from_values
from peagle.corpus.rows import RawRow
from peagle.corpus.types import can_be_stored, holds, is_too_deep, is_wide
from peagle.plain_json import to_json

JSON_TEXT = {b"peagle": b"json"}  # marks a column that is carried as text, other values than strings as JSON
_WIDE = {b"peagle": b"wide"}  # only while columns are found: it has integers that a double does not hold exactly
_ROWS_PER_INFERENCE = 4096


class Columns:
    """The Arrow schema that fits every row added so far."""

    def __init__(self) -> None:
        self._fields: dict[str, pa.Field] = {}
        self._pending: list[dict[str, Any]] = []

    def add(self, row: RawRow) -> None:
        """Take a row into account; one that is no row has no columns."""
        self._pending.append({} if row.error else row.columns)
        if len(self._pending) == _ROWS_PER_INFERENCE:
            self._infer()

    def schema(self) -> pa.Schema:
        """The schema of all rows."""
        self._infer()
        # A column that is null in every row has no type to widen to later: text can hold any.
        return pa.schema(
            [pa.field(f.name, pa.string()) if pa.types.is_null(f.type) else f for f in self._fields.values()]
        )

    def _infer(self) -> None:
        for name in dict.fromkeys(key for row in self._pending for key in row):
            inferred = _infer_field(name, [row.get(name) for row in self._pending])
            self._fields[name] = widen(self._fields[name], inferred) if name in self._fields else inferred
        self._pending.clear()


def json_text(name: str) -> pa.Field:
    """A column of any values, carried as text."""
    return pa.field(name, pa.string(), metadata=JSON_TEXT)


def widen(a: pa.Field, b: pa.Field) -> pa.Field:
    """One column that holds the values of both."""
    if _is_json(a) or _is_json(b):
        return json_text(a.name)
    try:
        both = pa.unify_schemas([pa.schema([a]), pa.schema([b])], promote_options="permissive").field(0)
    except pa.ArrowException:
        return json_text(a.name)
    if not all(holds(both.type, one.type, wide=_is_wide(one)) for one in (a, b)):
        return json_text(a.name)
    return wide(both) if _is_wide(a) or _is_wide(b) else both


def wide(column: pa.Field) -> pa.Field:
    """The column, known to have integers that a double does not hold exactly, or not known to have none."""
    return column.with_metadata({**(column.metadata or {}), **_WIDE})


def unify(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The columns of several files together, in types that Parquet can hold."""
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for column in schema:
            fields[column.name] = widen(fields[column.name], column) if column.name in fields else column
    return pa.schema([_stored(column) for column in fields.values()])


def to_table(rows: Sequence[RawRow], schema: pa.Schema) -> pa.Table:
    """The rows' columns under the corpus's schema; a bad row is all nulls."""
    arrays = []
    for column in schema:
        values = [None if row.error else row.columns.get(column.name) for row in rows]
        if _is_json(column):
            values = [v if v is None or isinstance(v, str) else to_json(v) for v in values]
        arrays.append(from_values(values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema) if arrays else pa.table({})


def _infer_field(name: str, values: list[Any]) -> pa.Field:
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return json_text(name)
    if is_too_deep(array.type):
        return json_text(name)
    column = pa.field(name, array.type)
    return wide(column) if is_wide(array) else column


def _stored(column: pa.Field) -> pa.Field:
    """The column as it is written: one of any file may be null in the rows of another."""
    if _is_json(column) or (pa.types.is_nested(column.type) and not can_be_stored(pa.schema([column]))):
        return json_text(column.name)
    if _is_wide(column):
        column = column.with_metadata({key: value for key, value in column.metadata.items() if key not in _WIDE})
    return column.with_nullable(True)


def _is_json(column: pa.Field) -> bool:
    return _is_marked(column, JSON_TEXT)


def _is_wide(column: pa.Field) -> bool:
    return _is_marked(column, _WIDE)


def _is_marked(column: pa.Field, mark: Mapping[bytes, bytes]) -> bool:
    return bool(column.metadata) and mark.items() <= column.metadata.items()
