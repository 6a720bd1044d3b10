"""Arrow types of columns: what Parquet can hold, and whether a type holds every value of another.

Pure functions of types and arrays; it knows no rows and no files of ours.
"""

import io
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from peagle.corpus.extensions import children, storage_schema

_DEEPEST = 100  # levels that Parquet has at most
_NANOSECOND_TIME = pa.time64("ns")
LARGEST_EXACT = 2**53  # a double holds every integer up to here, and not every one beyond


def can_be_stored(schema: pa.Schema) -> bool:
    """Whether Parquet can hold columns like these, and gives them back: not empty structs, nor too deep ones."""
    sink = io.BytesIO()
    try:
        pq.write_table(storage_schema(schema).empty_table(), sink)
        pq.read_schema(io.BytesIO(sink.getvalue()))
    except (OSError, pa.ArrowException):
        return False
    return True


def is_too_deep(type_: pa.DataType) -> bool:
    """Whether a type has more levels than Parquet can hold; it may have more than Python can go down."""
    level = [type_]
    for _ in range(_DEEPEST):
        level = [field.type for one in level for field in children(one)]
        if not level:
            return False
    return True


def holds(new: pa.DataType, old: pa.DataType, *, wide: bool) -> bool:
    """Whether every value of `old` can be a value of `new`, to which Arrow would widen it.

    Args:
        wide: `old` may have integers beyond `LARGEST_EXACT`.
    """
    if new == old or pa.types.is_null(old):
        return True
    if pa.types.is_nested(new):
        parts = {field.name: field.type for field in children(new)}
        pairs = [(parts.get(field.name), field.type) for field in children(old)]
        if not pa.types.is_struct(new):  # an item of a list has no name that counts
            pairs = list(zip(parts.values(), (theirs for _, theirs in pairs), strict=False))
        return all(ours is not None and holds(ours, theirs, wide=wide) for ours, theirs in pairs)
    if pa.types.is_integer(old):
        return not (wide and old.bit_width == 64)
    if pa.types.is_decimal(old):
        return bool(pa.types.is_decimal(new))
    # A nanosecond is too short for years before 1678 and after 2261; 9999 is in use for "never".
    return not (pa.types.is_temporal(old) and getattr(new, "unit", None) == "ns" and not pa.types.is_time(new))


def is_wide(array: pa.Array | pa.ChunkedArray) -> bool:
    """Whether integers beyond `LARGEST_EXACT` are in it, at any depth."""
    if isinstance(array, pa.ChunkedArray):
        return any(map(is_wide, array.chunks))
    if pa.types.is_integer(array.type) and array.type.bit_width == 64:
        ends = pc.min_max(array).as_py()
        return any(end is not None and abs(end) > LARGEST_EXACT for end in ends.values())
    if pa.types.is_struct(array.type):
        return any(map(is_wide, array.flatten()))
    return bool(pa.types.is_list(array.type)) and is_wide(array.flatten())


def has_long_integers(type_: pa.DataType) -> bool:
    """Whether integers of 64 bits are in it, at any depth."""
    return any(pa.types.is_integer(leaf) and leaf.bit_width == 64 for leaf in _leaves(type_))


def has_nanosecond_times(type_: pa.DataType) -> bool:
    """Whether times of day in nanoseconds are in it, at any depth."""
    return any(leaf == _NANOSECOND_TIME for leaf in _leaves(type_))


def loses_nanoseconds(array: pa.Array) -> bool:
    """Whether times of day are in it, at any depth, that are no whole microseconds: Python has no others."""
    if array.type == _NANOSECOND_TIME:
        whole = array.cast(pa.time64("us"), safe=False).cast(_NANOSECOND_TIME)
        return not array.equals(whole)
    if pa.types.is_struct(array.type):
        return any(map(loses_nanoseconds, array.flatten()))
    if pa.types.is_map(array.type):
        return loses_nanoseconds(array.keys) or loses_nanoseconds(array.items)
    return bool(pa.types.is_nested(array.type)) and loses_nanoseconds(array.flatten())


def repeated_name(fields: Iterable[pa.Field]) -> str | None:
    """The name that two of these columns have, or two parts of a column at any depth; None if there is none."""
    seen: set[str] = set()
    for field in fields:
        name: str = field.name
        if name in seen:
            return name
        seen.add(name)
        if inner := repeated_name(children(field.type)):
            return f"{name}.{inner}"
    return None


def _leaves(type_: pa.DataType) -> Iterator[pa.DataType]:
    if not pa.types.is_nested(type_):
        yield type_
    for field in children(type_):
        yield from _leaves(field.type)
