from dataclasses import replace
from types import SimpleNamespace

import pytest

from peagle.economics.usage import EngineSession, UnitUsage
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
def make(decided):
    """The metrics of a run of the fake engine."""

    def make(served_name=None, **keys):
        return metrics_of(*decided(num_speculative_tokens=2, **keys), served_name)

    return make


def unit(num_rows, num_failed_rows=0):
    return UnitUsage(
        session_id="s", num_rows=num_rows, num_failed_rows=num_failed_rows, num_prompt_tokens=5, num_cached_tokens=0,
        num_output_tokens=30, busy_s=1.0, started_at=1.0, finished_at=2.0,
        speculation=SpeculationStats(num_drafts=10, num_draft_tokens=20, accepted_per_position=(6, 3)),
    )  # fmt: skip


def beat(life_s):
    return EngineSession(
        session_id="s", engine_index=0, hostname="h", num_devices=2, device="vcpu", started_at=0.0, last_seen_at=life_s,
        load_s=1.0, compile_s=0.0, busy_s=life_s - 1.0, idle_s=0.0, num_output_tokens=0, ended=False,
        usd_per_device_s=0.5,
    )  # fmt: skip


def test_metrics_of_committed_units(told, make):
    run = make()
    run.committed(unit(3, 1))
    run.committed(unit(4))
    assert told["peagle_rows_total", *MODEL, "ok"] == 7
    assert told["peagle_rows_total", *MODEL, "failed"] == 1
    assert told["peagle_output_tokens_total", *MODEL] == 60
    assert told["peagle_accepted_tokens_per_pos_total", *MODEL, "1"] == 6
    assert not any(name[0].startswith("gen_ai") for name in told)  # nobody knows when its requests began


def test_gauges_of_a_run(told, make, monkeypatch):
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=lambda: 1000.0))
    run = make(budget_usd=20, deadline="2026-12-01T00:00:00Z")
    tally = Tally(num_rows_planned=12, num_rows=5, num_failed_rows=1, usd=3.0, num_engines=2, seconds_left=60.0)
    run.look(tally, [beat(3.0)])
    run.look(tally, [beat(4.0)])
    assert {key[-1]: told[key] for key in told if key[0] == "peagle_run_rows"} == {"done": 5, "failed": 1, "left": 6}
    assert told["peagle_run_usd", *RUN] == 3.0
    assert told["peagle_run_engines", *RUN] == 2
    assert told["peagle_run_budget_usd", *RUN] == 20
    assert told["peagle_run_deadline_timestamp_seconds", *RUN] == 1796083200
    assert told["peagle_run_expected_end_timestamp_seconds", *RUN] == 1060.0
    assert told["peagle_engine_usd_total", *MODEL, "start"] == pytest.approx(1.0)
    assert told["peagle_engine_usd_total", *MODEL, "busy"] == pytest.approx(3.0)


def test_no_gauges_for_missing_limits(told, make):
    make().look(Tally(num_rows_planned=12), [])
    assert ("peagle_run_usd", *RUN) in told
    limits = (
        "peagle_run_budget_usd",
        "peagle_run_deadline_timestamp_seconds",
        "peagle_run_expected_end_timestamp_seconds",
    )
    assert not any((name, *RUN) in told for name in limits)


def test_batch_metrics_use_the_served_name(told, make):
    make("mine").committed(unit(1))
    assert ("peagle_rows_total", "mine", "fake", "ok") in told


@pytest.mark.parametrize(("break_even", "expected"), [({1: 1.2, 8: 2.0}, 2.0), ({}, None)])
def test_break_even_gauge(told, decided, break_even, expected):
    request, run = decided()
    engine = SimpleNamespace(
        break_even=lambda hardware: break_even, model=run.model, drafter=run.drafter,
        spec=replace(run.spec, max_num_seqs=8),
    )  # fmt: skip
    metrics_of(request, replace(run, engine=engine))
    assert told.get(("peagle_break_even_acceptance_length", "fake", "")) == expected
