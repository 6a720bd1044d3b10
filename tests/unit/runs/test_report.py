import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.prices import Price
from peagle.errors import CapacityError
from peagle.runs import report
from peagle.runs.columns import OUTPUT_SCHEMA
from peagle.runs.directory import RunDirectory
from peagle.runs.report import failures, histogram, make_report, row_statistics


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
    report_facts = {}
    monkeypatch.setattr(report, "report_dict", lambda _, information: report_facts.update(information) or {"notes": []})
    monkeypatch.setattr(report, "render_html", lambda _: "")
    report.make_report(run)
    assert report_facts["num_engines"] == expected


def plan_of(num_units, num_retries=0):
    units = [SimpleNamespace(unit=number) for number in range(num_units)]
    return SimpleNamespace(units=units, num_retries=num_retries)


@pytest.mark.parametrize(
    ("reads", "num_calls"),  # each read: the plan and the committed units
    [
        ([(plan_of(1), {0}), (plan_of(1), {0})], 1),
        ([(plan_of(2), {0}), (plan_of(2), {0})], 1),  # unfinished: the driver that finishes the run computes it again
        ([(plan_of(1), {0}), (plan_of(2, 1), {0})], 1),  # a retry was added
        ([(plan_of(1), {0}), *[(plan_of(2, 1), {0, 1})] * 3], 2),  # a retry was added and committed
        ([(plan_of(2), {0}), *[(plan_of(2), {0, 1})] * 3], 2),
    ],
)
def test_result_is_computed_again_if_the_run_was_finished_meanwhile(reads, num_calls):
    calls = []
    run = SimpleNamespace(plan=lambda: reads[0][0], committed=lambda: reads.pop(0)[1])
    report.retry_if_changed(run, lambda: calls.append(1))
    assert len(calls) == num_calls


SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path, one_unit_plan):
    """A run of the fake engine. Each test commits its rows."""
    run = RunDirectory(tmp_path / "run")
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)
    run_facts = {"model": "fake", "num_engines": 1}
    manifest = {"price": price.to_dict(), "run": run_facts, "config": {"engine": "fake"}, "created_at": 1.0}
    run.create(manifest, one_unit_plan)
    run.write_session(engine_session("a", started_at=1.0, load_s=1.0, busy_s=7.0, num_output_tokens=9))
    return run


def commit(run, rows, *, unit=0, dead_letters=()):
    times = {"busy_s": 5.0, "started_at": 2.0, "finished_at": 7.0}
    usage = unit_usage("a", num_rows=len(rows), num_failed_rows=len(dead_letters), num_output_tokens=9, **times)
    schema = pa.schema([("prompt", pa.string()), ("weight", pa.float64()), *OUTPUT_SCHEMA])
    table = pa.Table.from_pylist([dict.fromkeys(schema.names) | row for row in rows], schema)
    assert run.commit(unit, table, usage, dead_letters)


def make_row(number, **more):
    return {
        "id": f"{number:09d}",
        "prompt": f"prompt {number}",
        "weight": 0.5,
        "response": f"answer {number}",
        "finish_reason": "stop",
        "num_prompt_tokens": 10,
        "num_output_tokens": number + 1,
        "ttft_s": 0.01,
        "latency_s": 0.1 * (number + 1),
        **more,
    }


def test_row_statistics_have_finish_reasons_and_percentiles(run):
    rows = [make_row(number, finish_reason="length" if number % 4 == 0 else "stop") for number in range(100)]
    commit(run, rows)
    figures = row_statistics(run)
    assert figures["num_read"] == 100
    assert figures["finish_reasons"] == {"stop": 75, "length": 25}
    lengths = figures["measures"]["num_output_tokens"]
    assert (lengths["p50"], lengths["p99"]) == (pytest.approx(50.5), pytest.approx(99.01))
    assert sum(lengths["histogram"]["counts"]) == 100
    assert figures["measures"]["latency_s"]["p95"] == pytest.approx(9.505)
    assert figures["measures"]["num_prompt_tokens"]["histogram"] == {
        "first": 10.0, "step": 1.0, "counts": [100], "has_more": False,
    }  # fmt: skip


def test_row_statistics_have_three_samples_with_truncated_texts(run):
    commit(run, [make_row(number, response="x" * 5000) for number in range(9)])
    samples = row_statistics(run)["samples"]
    assert [sample["id"] for sample in samples] == ["000000000", "000000004", "000000008"]
    assert samples[1]["input"] == [["prompt", "prompt 4"], ["weight", "0.5"]]
    assert len(samples[1]["answer"]) < 1300
    assert samples[1]["answer"].endswith("x …")


def test_row_statistics_of_two_rows_without_ttft(run):
    commit(run, [make_row(number, ttft_s=None) for number in range(2)])
    figures = row_statistics(run)
    assert [sample["id"] for sample in figures["samples"]] == ["000000000", "000000001"]
    assert "ttft_s" not in figures["measures"]


def test_large_runs_are_sampled(run, monkeypatch):
    monkeypatch.setattr(report, "MAX_UNITS", 2)
    monkeypatch.setattr("peagle.runs.directory.BATCH_ROWS", 3)
    for unit in range(4):
        commit(run, [make_row(10 * unit + number) for number in range(5)], unit=unit)
    figures = row_statistics(run)
    assert figures["num_read"] == 6
    assert [sample["id"] for sample in figures["samples"]] == ["000000000", "000000020", "000000022"]


def test_row_statistics_are_none_without_rows(run):
    assert row_statistics(run) is None
    commit(run, [], dead_letters=[{"reason": "refused", "message": "no"}])
    assert row_statistics(run) is None


def test_failures_are_counted_by_reason(run):
    dead_letters = [{"reason": "invalid", "message": "first"}, {"reason": "refused", "message": "y" * 900}]
    dead_letters += [{"reason": "invalid", "message": "second"}]
    commit(run, [make_row(0)], dead_letters=dead_letters)
    counted_failures = failures(run)
    assert [(failure["reason"], failure["count"]) for failure in counted_failures] == [("invalid", 2), ("refused", 1)]
    assert counted_failures[0]["example"] == "first"
    assert len(counted_failures[1]["example"]) < 210


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e-5, 2e-5, 3e-5], [1.0, 2.0, 1e9], list(range(1000))])
def test_histogram_has_every_value(values):
    bins = histogram(np.array(values))
    assert sum(bins["counts"]) == len(values)
    assert len(bins["counts"]) <= 27
    assert bins["first"] <= min(values)


def test_last_bin_of_a_histogram_has_the_largest_values():
    bins = histogram(np.array([*range(1000), 10**6]))
    assert bins["has_more"]
    assert bins["counts"][-1] >= 1
    assert bins["first"] + bins["step"] * (len(bins["counts"]) - 1) < 1200


def test_report_is_made_without_failures_if_dead_letters_are_missing(run):
    commit(run, [make_row(0)], dead_letters=[{"reason": "invalid", "message": "no"}])
    (letters_file,) = (run.root / "failed").iterdir()
    letters_file.unlink()
    result = make_report(run)
    assert result["account"]["num_failed_rows"] == 1
    assert result["failures"] is None
    assert result["rows"]["num_read"] == 1
    assert f"The failures are not shown: {letters_file}" in result["notes"][-1]


def test_report_has_row_sections_and_labels_the_fake_engine(run):
    commit(
        run,
        [make_row(0, response=SCRIPT, prompt=SCRIPT), make_row(1)],
        dead_letters=[{"reason": "invalid", "message": SCRIPT}],
    )
    result = make_report(run)
    page = (run.root / "report.html").read_text(encoding="utf-8")
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;alert(1)") == 3
    assert "FAKE ENGINE: speed and dollars are not real" in page
    assert result["run"]["is_stand_in"] is True
    assert result["timeline"]["engines"][0]["spans"] == [("load", 0.0, 1.0), ("busy", 1.0, 6.0), ("lost", 6.0, 8.0)]
    assert json.loads((run.root / "report.json").read_bytes())["failures"][0]["count"] == 1
