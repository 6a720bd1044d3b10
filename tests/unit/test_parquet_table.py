import io
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.parquet_table import read_table

TABLE = pa.table(
    {"n": range(5000), "text": [f"{n}" * 20 for n in range(5000)], "list": [[n] for n in range(5000)]}
).replace_schema_metadata({"key": "value"})


def table_file() -> io.BytesIO:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, row_group_size=100)
    return io.BytesIO(sink.getvalue())


def test_table_equals_that_of_arrows_reader():
    reference = pq.read_table(table_file())
    assert reference.equals(TABLE)
    assert read_table(table_file()).equals(reference, check_metadata=True)
    assert read_table(table_file(), ["n", "list"]).equals(TABLE.select(["n", "list"]))


def test_invalid_file_is_an_arrow_error():
    with pytest.raises(pa.ArrowException):
        read_table(io.BytesIO(b"no parquet"))


def test_file_is_released_after_reading():
    """After `pq.read_table`, Arrow's threads still hold the file, and processes can abort.

    The script runs in a separate process, because Arrow's threads in this process might hold files of other tests.
    """
    script = """if True:
        import sys
        from peagle.parquet_table import read_table
        from tests.unit.test_parquet_table import table_file
        source = table_file()
        before = sys.getrefcount(source)
        for _ in range(1000):
            source.seek(0)
            read_table(source)
            assert sys.getrefcount(source) == before
            assert not source.closed
    """
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)
