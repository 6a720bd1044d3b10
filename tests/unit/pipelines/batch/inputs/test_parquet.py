import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.batch import corpus
from pipelines.batch.cutting import Cut
from pipelines.batch.workload import Workload


@pytest.mark.parametrize("row_group_size", [3, 1000, 5000])
def test_spans_in_any_order_are_the_rows_that_they_name(tmp_path, row_group_size):
    pq.write_table(pa.table({"n": list(range(5000))}), tmp_path / "a.parquet", row_group_size=row_group_size)
    spans, _, _ = corpus.scan(corpus.find(str(tmp_path)), Cut(rows_per_unit=700), None, Workload())
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 4, 7], [6, 2, 3]):
        for index in order:
            rows = [row.columns["n"] for row in corpus.read(spans[index])]
            assert rows == list(range(index * 700, min(5000, index * 700 + 700)))
