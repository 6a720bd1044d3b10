import pyarrow as pa
import pytest

from peagle.corpus.rows import Span
from peagle.runs.plan import Plan, WorkUnit


@pytest.fixture
def one_unit_plan():
    """A plan of one unit with two rows."""
    span = Span(path="a.jsonl", format="jsonl", first_row=0, num_rows=2)
    return Plan(
        units=(WorkUnit(unit=0, first_id=0, span=span),),
        rows_per_unit=2,
        schema=pa.schema([("prompt", pa.string())]),
        corpus_fingerprint="c",
    )
