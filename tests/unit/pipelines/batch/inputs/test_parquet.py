import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.batch import corpus
from pipelines.batch.cutting import Cut
from pipelines.batch.workload import Workload


def scan(path, **keys):
    return corpus.scan(corpus.find(str(path)), Cut(rows_per_unit=700), None, Workload(), **keys)


@pytest.fixture
def edited(tmp_path):
    """A file, and the same with one character changed in its middle: of equal length, its footer says the same."""
    prompts = [f"{n:06d} a prompt of some length" for n in range(5000)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data.replace(b"002500 a prompt", b"002500 A prompt"))
    return tmp_path / "a.parquet", tmp_path / "b.parquet"


def test_a_fingerprint_is_of_every_byte(edited):
    before, after = edited
    assert before.stat().st_size == after.stat().st_size
    assert pq.read_metadata(before).equals(pq.read_metadata(after))
    assert pq.read_table(before) != pq.read_table(after)
    assert scan(before)[2] != scan(after)[2]
    assert scan(before)[2] == scan(before, like=scan(after)[2])[2]


def test_a_fingerprint_that_is_compared_with_an_older_one_is_made_as_that_was(edited):
    path, _ = edited
    data = path.read_bytes()
    older = hashlib.sha256(b"parquet " + f"{len(data)} 5000 ".encode() + data[-65536:]).hexdigest()
    assert scan(path, like=older)[2] == older


@pytest.mark.parametrize("row_group_size", [3, 1000, 5000])
def test_spans_in_any_order_are_the_rows_that_they_name(tmp_path, row_group_size):
    pq.write_table(pa.table({"n": list(range(5000))}), tmp_path / "a.parquet", row_group_size=row_group_size)
    spans, _, _ = corpus.scan(corpus.find(str(tmp_path)), Cut(rows_per_unit=700), None, Workload())
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 4, 7], [6, 2, 3]):
        for index in order:
            rows = [row.columns["n"] for row in corpus.read(spans[index])]
            assert rows == list(range(index * 700, min(5000, index * 700 + 700)))
