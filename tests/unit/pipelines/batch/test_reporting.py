import pyarrow as pa
import pytest

from peagle.economics.prices import Price
from peagle.errors import CapacityError
from pipelines.batch import reporting
from pipelines.batch.inputs.span import Span
from pipelines.batch.plan import Plan, WorkUnit
from pipelines.batch.rundir import RunDirectory


def test_a_report_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    span = Span(path="a.jsonl", format="jsonl", first_row=0, num_rows=2)
    plan = Plan(
        units=(WorkUnit(unit=0, first_id=0, span=span),),
        rows_per_unit=2,
        schema=pa.schema([("prompt", pa.string())]),
        corpus_fingerprint="c",
    )
    run = RunDirectory(tmp_path / "run")
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)
    run.create({"price": price.to_dict(), "run": {"num_engines": 1}, "created_at": 1.0}, plan)
    (run.root / "report.json").mkdir()  # who may write everything cannot write this either
    monkeypatch.setattr(reporting, "report_dict", lambda *_: {"notes": []})
    with pytest.raises(CapacityError, match=r"cannot be written(.|\n)*peagle status"):
        reporting.make_report(run)
