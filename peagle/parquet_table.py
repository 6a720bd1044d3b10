"""A Parquet file as one table, read without pyarrow's threads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow as pa


def read_table(source: BinaryIO, columns: Sequence[str] | None = None) -> "pa.Table":
    """Return the table of an open file.

    The threads of `pyarrow.parquet.read_table` may release Python objects while the process exits. Then the process
    aborts or hangs.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(source, pre_buffer=False) as file:
        return file.read(columns=columns, use_threads=False)
