"""A Parquet file as one table, read by this thread alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow as pa


def read_table(source: BinaryIO, columns: Sequence[str] | None = None) -> "pa.Table":
    """The table of a file that is open.

    `pyarrow.parquet.read_table` leaves what it has read to threads of its own, which let go of Python's objects when
    they come to it: a process that ends meanwhile is aborted, or never ends.

    Raises:
        OSError, pa.ArrowException: it is damaged.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(source) as file:
        return file.read(columns=columns, use_threads=False)
