from dataclasses import replace
from types import SimpleNamespace

import pytest
from usage_records import engine_session, unit_usage

from peagle.runs.progress import Tally
from peagle.speculation import SpeculationStats
from pipelines.batch import metrics
from pipelines.batch.metrics import RunMetrics

MODEL = ("fake", "fake")
RUN = (*MODEL, "run-1")


def metrics_of(request, run, served_name=None):
    manifest = {"run_id": "run-1", "served_name": served_name}
    return RunMetrics(request, replace(run, directory=SimpleNamespace(manifest=lambda: manifest)))


@pytest.fixture
def make_metrics(resolved_run):
    """Return a function that makes the metrics of a run of the fake engine."""

    def make(served_name=None, **options):
        return metrics_of(*resolved_run(num_speculative_tokens=2, **options), served_name)

    return make


def make_unit_usage(num_rows, num_failed_rows=0):
    return unit_usage(
        num_rows=num_rows,
        num_failed_rows=num_failed_rows,
        num_prompt_tokens=5,
        num_output_tokens=30,
        speculation=SpeculationStats(num_drafts=10, num_draft_tokens=20, accepted_per_position=(6, 3)),
    )


def make_session(lifetime_s):
    return engine_session(
        num_devices=2, last_seen_at=lifetime_s, load_s=1.0, busy_s=lifetime_s - 1.0, ended=False, usd_per_device_s=0.5
    )


def test_counters_add_up_committed_units(ray_metrics, make_metrics):
    run_metrics = make_metrics()
    run_metrics.record_committed(make_unit_usage(3, 1))
    run_metrics.record_committed(make_unit_usage(4))
    assert ray_metrics["peagle_rows_total", *MODEL, "ok"] == 7
    assert ray_metrics["peagle_rows_total", *MODEL, "failed"] == 1
    assert ray_metrics["peagle_output_tokens_total", *MODEL] == 60
    assert ray_metrics["peagle_accepted_tokens_per_pos_total", *MODEL, "1"] == 6
    assert not any(name[0].startswith("gen_ai") for name in ray_metrics)  # request start times are unknown


def test_gauges_have_the_values_of_the_last_update(ray_metrics, make_metrics, monkeypatch):
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=lambda: 1000.0))
    run_metrics = make_metrics(budget_usd=20, deadline="2026-12-01T00:00:00Z")
    tally = Tally(num_rows_planned=12, num_rows=5, num_failed_rows=1, usd=3.0, num_engines=2, seconds_left=60.0)
    run_metrics.update(tally, [make_session(3.0)])
    run_metrics.update(tally, [make_session(4.0)])
    assert {key[-1]: ray_metrics[key] for key in ray_metrics if key[0] == "peagle_run_rows"} == {
        "done": 5,
        "failed": 1,
        "left": 6,
    }
    assert ray_metrics["peagle_run_usd", *RUN] == 3.0
    assert ray_metrics["peagle_run_engines", *RUN] == 2
    assert ray_metrics["peagle_run_budget_usd", *RUN] == 20
    assert ray_metrics["peagle_run_deadline_timestamp_seconds", *RUN] == 1796083200
    assert ray_metrics["peagle_run_expected_end_timestamp_seconds", *RUN] == 1060.0
    assert ray_metrics["peagle_engine_usd_total", *MODEL, "start"] == pytest.approx(1.0)
    assert ray_metrics["peagle_engine_usd_total", *MODEL, "busy"] == pytest.approx(3.0)


def test_no_gauges_for_missing_limits(ray_metrics, make_metrics):
    make_metrics().update(Tally(num_rows_planned=12), [])
    assert ("peagle_run_usd", *RUN) in ray_metrics
    limits = (
        "peagle_run_budget_usd",
        "peagle_run_deadline_timestamp_seconds",
        "peagle_run_expected_end_timestamp_seconds",
    )
    assert not any((name, *RUN) in ray_metrics for name in limits)


def test_batch_metrics_use_the_served_name(ray_metrics, make_metrics):
    make_metrics("mine").record_committed(make_unit_usage(1))
    assert ("peagle_rows_total", "mine", "fake", "ok") in ray_metrics


@pytest.mark.parametrize(("break_even", "expected"), [({1: 1.2, 8: 2.0}, 2.0), ({}, None)])
def test_break_even_gauge_is_for_full_slots(ray_metrics, resolved_run, break_even, expected):
    request, run = resolved_run()
    engine = SimpleNamespace(
        break_even=lambda hardware: break_even, model=run.model, drafter=run.drafter,
        spec=replace(run.spec, max_num_seqs=8),
    )  # fmt: skip
    metrics_of(request, replace(run, engine=engine))
    assert ray_metrics.get(("peagle_break_even_acceptance_length", "fake", "")) == expected
