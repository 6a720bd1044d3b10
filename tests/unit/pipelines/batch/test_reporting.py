import pytest

from peagle.economics.prices import Price
from peagle.errors import CapacityError
from pipelines.batch import reporting
from pipelines.batch.rundir import RunDirectory


def test_a_report_that_cannot_be_written_says_so(tmp_path, one_unit_plan, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)
    run.create({"price": price.to_dict(), "run": {"num_engines": 1}, "created_at": 1.0}, one_unit_plan)
    (run.root / "report.json").mkdir()  # who may write everything cannot write this either
    monkeypatch.setattr(reporting, "report_dict", lambda *_: {"notes": []})
    with pytest.raises(CapacityError, match=r"cannot be written(.|\n)*peagle status"):
        reporting.make_report(run)
