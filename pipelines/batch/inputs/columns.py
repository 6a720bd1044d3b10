"""The columns of rows that carry no schema: one Arrow type for each, found in one pass with bounded memory.

Columns are the union of all keys, numbers widen (int to float), and a column whose values have no common Arrow type
is carried as text: strings as they are, other values as JSON. It knows no file and no format.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from pipelines.batch.inputs.span import RawRow

JSON_TEXT = {b"peagle": b"json"}  # marks a column that is carried as text, other values than strings as JSON
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
    if a.metadata or b.metadata:
        return json_text(a.name)
    try:
        return pa.unify_schemas([pa.schema([a]), pa.schema([b])], promote_options="permissive").field(0)
    except pa.ArrowException:
        return json_text(a.name)


def unify(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The columns of several files together."""
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for column in schema:
            fields[column.name] = widen(fields[column.name], column) if column.name in fields else column
    return pa.schema(list(fields.values()))


def to_table(rows: Sequence[RawRow], schema: pa.Schema) -> pa.Table:
    """The rows' columns under the corpus's schema; a bad row is all nulls."""
    arrays = []
    for column in schema:
        values = [None if row.error else row.columns.get(column.name) for row in rows]
        if column.metadata and column.metadata.get(b"peagle") == b"json":
            values = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
        arrays.append(pa.array(values, type=column.type))
    return pa.Table.from_arrays(arrays, schema=schema) if arrays else pa.table({})


def _infer_field(name: str, values: list[Any]) -> pa.Field:
    try:
        return pa.field(name, pa.array(values).type)
    except (pa.ArrowException, OverflowError):
        return json_text(name)
