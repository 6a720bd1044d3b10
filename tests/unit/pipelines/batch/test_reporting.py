import pytest

from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession
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


@pytest.mark.parametrize(("asked_for", "lived", "reported"), [(1, 2, 2), (2, 0, 2), (None, 2, 2), (None, 0, 0)])
def test_the_engines_of_a_report_are_those_that_lived_at_once(
    tmp_path, one_unit_plan, monkeypatch, asked_for, lived, reported
):
    run = RunDirectory(tmp_path / "run")
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)
    run.create({"price": price.to_dict(), "run": {"num_engines": asked_for}, "created_at": 1.0}, one_unit_plan)
    for number in range(lived):
        run.write_session(
            EngineSession(
                session_id=f"s{number}",
                engine_index=number,
                hostname="h",
                num_devices=1,
                device="vcpu",
                started_at=1.0,
                last_seen_at=9.0,
                load_s=0.0,
                compile_s=0.0,
                busy_s=8.0,
                idle_s=0.0,
                num_output_tokens=0,
                ended=True,
            )
        )
    told = {}
    monkeypatch.setattr(reporting, "report_dict", lambda _, information: told.update(information) or {"notes": []})
    monkeypatch.setattr(reporting, "render_html", lambda _: "")
    reporting.make_report(run)
    assert told["num_engines"] == reported
