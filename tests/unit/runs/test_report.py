import pytest
from usage_records import engine_session

from peagle.economics.prices import Price
from peagle.errors import CapacityError
from peagle.runs import report
from peagle.runs.directory import RunDirectory


def test_unwritable_report_is_an_error(tmp_path, one_unit_plan, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)
    run.create({"price": price.to_dict(), "run": {"num_engines": 1}, "created_at": 1.0}, one_unit_plan)
    (run.root / "report.json").mkdir()  # even root cannot write a file here
    monkeypatch.setattr(report, "report_dict", lambda *_: {"notes": []})
    with pytest.raises(CapacityError, match=r"cannot be written(.|\n)*peagle status"):
        report.make_report(run)


@pytest.mark.parametrize(
    ("num_planned", "num_sessions", "expected"), [(1, 2, 2), (2, 0, 2), (None, 2, 2), (None, 0, 0)]
)
def test_report_counts_concurrent_engines(tmp_path, one_unit_plan, monkeypatch, num_planned, num_sessions, expected):
    run = RunDirectory(tmp_path / "run")
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)
    run.create({"price": price.to_dict(), "run": {"num_engines": num_planned}, "created_at": 1.0}, one_unit_plan)
    for number in range(num_sessions):
        run.write_session(engine_session(f"s{number}", engine_index=number, started_at=1.0, busy_s=8.0))
    values = {}
    monkeypatch.setattr(report, "report_dict", lambda _, information: values.update(information) or {"notes": []})
    monkeypatch.setattr(report, "render_html", lambda _: "")
    report.make_report(run)
    assert values["num_engines"] == expected


class Run:
    """A run directory that returns a given plan and commits at each read."""

    def __init__(self, *reads):
        self._reads = list(reads)
        self.num_retries = 0

    def plan(self):
        return self._reads[0][0]

    def committed(self):
        return self._reads.pop(0)[1]


class Plan:
    def __init__(self, num_units, num_retries=0):
        self.units = [type("Unit", (), {"unit": number}) for number in range(num_units)]
        self.num_retries = num_retries


@pytest.mark.parametrize(
    ("reads", "times"),
    [
        ([(Plan(1), {0}), (Plan(1), {0})], 1),
        ([(Plan(2), {0}), (Plan(2), {0})], 1),  # the driver that finishes the run makes it
        ([(Plan(1), {0}), (Plan(2, 1), {0})], 1),  # a retry was added
        ([(Plan(1), {0}), (Plan(2, 1), {0, 1}), (Plan(2, 1), {0, 1}), (Plan(2, 1), {0, 1})], 2),  # and committed
        ([(Plan(2), {0}), (Plan(2), {0, 1}), (Plan(2), {0, 1}), (Plan(2), {0, 1})], 2),
    ],
)
def test_result_is_repeated_if_the_run_changed_meanwhile(reads, times):
    calls = []
    report.until_settled(Run(*reads), lambda: calls.append(1))
    assert len(calls) == times
