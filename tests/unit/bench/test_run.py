"""`peagle bench` with fake engines."""

import json
from typing import Any

import pytest
from devices import gpu

from peagle.bench.config import BenchConfig
from peagle.bench.engine import MeasurementListener
from peagle.bench.run import bench
from peagle.economics.spending import Days, Spend, charges
from peagle.engine.fake import ByteTokenizer, FakeEngine, FakeTraits
from peagle.engine.spec import EngineSpec
from peagle.errors import ConfigError, EngineError
from peagle.runs.ledgers import find_ledgers

ROWS = [{"prompt": f"prompt {i}"} for i in range(6)]


class EngineStarter:
    """Starts fake engines, and records them and their specs. The engine with the index `failing_engine` fails."""

    def __init__(self, failing_engine=None, error=EngineError):
        self.engines: list[RecordingEngine] = []
        self.specs: list[EngineSpec] = []
        self._failing_engine, self._error = failing_engine, error

    def __call__(self, spec, hardware):
        assert all(engine.is_shut_down for engine in self.engines), "one engine at a time"
        self.specs.append(spec)
        k = spec.drafter.num_speculative_tokens if spec.drafter else 0
        self.engines.append(
            RecordingEngine(k, error=self._error if len(self.engines) == self._failing_engine else None)
        )
        return self.engines[-1]

    @property
    def ks(self):
        return [spec.drafter.num_speculative_tokens if spec.drafter else 0 for spec in self.specs]


class RecordingEngine(FakeEngine):
    """Records its number of running requests at each new one; fails at concurrency 3 if it has an `error`."""

    is_shut_down = False

    def __init__(self, k, *, error):
        super().__init__(FakeTraits(token_s=0.0005), num_speculative_tokens=k)
        self.concurrencies: list[int] = []
        self._running, self._error = 0, error

    async def generate(self, *args):
        # Requests that started alone: 7 at concurrency 1; then, at concurrency 3, a warm-up request and a prompt.
        if self._error and self.concurrencies.count(1) > 8:
            raise self._error("the vLLM engine process died")
        self._running += 1
        self.concurrencies.append(self._running)
        try:
            return await super().generate(*args)
        finally:
            self._running -= 1

    def shutdown(self):
        self.is_shut_down = True


@pytest.fixture
def run(target, write_head_folder, tmp_path, write_jsonl):
    """Return a function that runs `peagle bench` and returns the report."""

    def run(starter, messages=None, **options):
        values = {
            "model": str(target), "dataset": str(write_jsonl(ROWS)), "output": tmp_path / "out", "max_tokens": 40,
            "methods": "none,peagle", "drafter": f"peagle={write_head_folder()}", "num_speculative_tokens": "2,4",
            "concurrency": "1,3", "repeats": 2, "usd_per_hour": 3.6,
        } | options  # fmt: skip
        listener = MeasurementListener(say=(messages if messages is not None else []).append)
        report, folder = bench(BenchConfig(**values), listener, start=starter, tokenizer_of=lambda *_: ByteTokenizer())
        assert json.loads((folder / "report.json").read_bytes()) == report
        return report

    return run


def test_costs_of_engines_are_in_the_ledger(run, tmp_path):
    report = run(EngineStarter())
    (ledger,) = find_ledgers([str(tmp_path / "out")]).ledgers
    spend = sum((charge.spend for charge in charges(ledger, Days())), Spend())
    num_responses = sum(cell["num_responses"] for cell in report["cells"])
    assert (spend.num_requests, len(ledger.sessions)) == (num_responses, 5)
    assert all(session.ended for session in ledger.sessions)
    lifetime_s = sum(session.last_seen_at - session.started_at for session in ledger.sessions)
    total_usd = spend.attributed_usd + spend.loading_usd + spend.idle_usd + spend.lost_usd
    # Unix times are exact to a quarter of a microsecond, and these engines run for less than a second.
    assert total_usd == pytest.approx(lifetime_s * 0.001, abs=1e-8)  # $3.6 an hour is $0.001 a second
    busy_s = sum(session.busy_s for session in ledger.sessions)
    assert spend.attributed_usd == pytest.approx(busy_s * 0.001)
    assert spend.lost_usd == pytest.approx(0.0)
    sessions_with_k4 = [session for session in ledger.sessions if session.num_speculative_tokens == 4]
    assert {session.drafter is not None for session in sessions_with_k4} == {True}


def test_failed_start_has_a_cost(run, tmp_path):
    with pytest.raises(EngineError):
        run(fail_to_start)
    (ledger,) = find_ledgers([str(tmp_path / "out")]).ledgers
    assert all(session.ended and session.busy_s == session.idle_s == 0 for session in ledger.sessions)
    assert {session.num_speculative_tokens for session in ledger.sessions} == {0, 2, 4}


def fail_to_start(*_):
    raise EngineError("no memory")


def test_benchmark_measures_all_setups_in_two_rounds(run):
    starter = EngineStarter()
    report = run(starter)
    assert starter.ks == [0, 2, 4, 2, 0]  # K=4 ends the first round and begins the second with the same engine
    assert all(engine.is_shut_down and max(engine.concurrencies) == 3 for engine in starter.engines)
    assert {spec.max_num_seqs for spec in starter.specs} == {3}
    assert [(c["method"], c["k"], c["concurrency"], c["repeats"]) for c in report["cells"]] == [
        (method, k, c, 2) for method, k in (("none", 0), ("peagle", 2), ("peagle", 4)) for c in (1, 3)
    ]
    cell_without_drafter, cell_k2 = report["cells"][0], report["cells"][2]
    assert (cell_without_drafter["acceptance_length"], cell_without_drafter["num_drafts"]) == (None, 0)
    # The fake engine accepts only the first token of each draft.
    assert (cell_k2["acceptance_length"], cell_k2["acceptance_rates"]) == (2.0, [1.0, 0.0])
    assert cell_k2["num_responses"] == 12
    assert cell_without_drafter["tokens_per_usd"] == pytest.approx(cell_without_drafter["output_tokens_per_s"] * 1000)
    assert 0 < cell_without_drafter["ttft_s"]["p50"] <= cell_without_drafter["ttft_s"]["p99"]
    assert cell_without_drafter["tpot_s"]["p50"] >= 0.0005
    assert cell_without_drafter["peak_memory_gib"] > 0
    assert report["labels"] == []


def test_interrupted_benchmark_resumes(run, tmp_path):
    interrupted, resumed, repeated = (
        EngineStarter(failing_engine=1, error=KeyboardInterrupt),
        EngineStarter(),
        EngineStarter(),
    )
    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, messages)
    assert all(engine.is_shut_down for engine in interrupted.engines)
    partial = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [(c["method"], c["concurrency"], c["repeats"]) for c in partial["cells"]] == [
        ("none", 1, 1), ("none", 3, 1), ("peagle", 1, 1),
    ]  # fmt: skip
    assert (partial["num_passes_left"], partial["failed"]) == (9, {})
    assert messages[-1] == f"report of the finished passes: {tmp_path / 'out' / 'report.md'}"
    finished_cells = {file.name: file.read_bytes() for file in (tmp_path / "out" / "cells").iterdir()}
    assert sorted(name.split("-k")[1] for name in finished_cells) == ["0-c1-r0.json", "0-c3-r0.json", "2-c1-r0.json"]
    report = run(resumed)
    assert resumed.ks == [2, 4, 2, 0]
    assert len(resumed.engines[0].concurrencies) == 3 + 6  # warm-up and prompts of the remaining concurrency 3
    assert all((tmp_path / "out" / "cells" / name).read_bytes() == data for name, data in finished_cells.items())
    assert run(repeated)["cells"] == report["cells"]
    assert repeated.specs == []


def test_failed_engine_is_reported_and_retried(run, tmp_path):
    failing, retry = EngineStarter(failing_engine=1), EngineStarter()
    messages: list[str] = []
    report = run(failing, messages)
    assert failing.ks == [0, 2, 4, 0], "a failed engine is not restarted in the second round"
    assert all(engine.is_shut_down for engine in failing.engines)
    assert [(c["k"], c["concurrency"], c["repeats"]) for c in report["cells"]] == [
        (0, 1, 2), (0, 3, 2), (2, 1, 1), (4, 1, 2), (4, 3, 2),
    ]  # fmt: skip
    assert report["failed"] == {"P-EAGLE K=2": "the vLLM engine process died"}
    assert report["num_passes_left"] == 3
    assert "  skipping P-EAGLE K=2: the vLLM engine process died" in messages
    assert "left" not in messages[-1]
    note = "Not complete: P-EAGLE K=2, because its engine failed: the vLLM engine process died"
    assert note in (tmp_path / "out" / "report.md").read_text()
    retry_report = run(retry)
    assert retry.ks == [2]
    assert (retry_report["failed"], retry_report["num_passes_left"], len(retry_report["cells"])) == ({}, 0, 6)


def test_benchmark_fails_if_all_engines_fail(run, tmp_path):
    specs: list[EngineSpec] = []

    def fail(spec, hardware):
        specs.append(spec)
        raise EngineError(f"vLLM did not start: number {len(specs)}")

    with pytest.raises(EngineError, match="number 3"):
        run(fail)
    assert len(specs) == 3
    assert not (tmp_path / "out" / "report.json").exists()


def test_time_budget_stops_a_benchmark_between_passes(run, tmp_path):
    starters: list[EngineStarter] = []
    num_left = []
    while not num_left or num_left[-1]:
        starters.append(EngineStarter())
        num_left.append(run(starters[-1], repeats=1, time_budget_s=1e-6)["num_passes_left"])
        assert len(starters) <= 6
    assert num_left == [5, 4, 3, 2, 1, 0]  # each command runs at least one pass; with this budget, exactly one
    assert [starter.ks for starter in starters] == [[0], [0], [2], [2], [4], [4]]
    assert "Not finished" not in (tmp_path / "out" / "report.md").read_text()
    unfinished = run(EngineStarter(), repeats=2, time_budget_s=1e-6)
    assert unfinished["num_passes_left"] == 5
    assert unfinished["caveats"][-1] == "Not finished: 5 of 12 passes remain."
    assert unfinished["notes"][0].startswith("P-EAGLE: ")
    assert unfinished["notes"][1:] == unfinished["caveats"]
    assert "Not finished: 5 of 12 passes remain." in (tmp_path / "out" / "report.md").read_text()


def test_methods_k_and_repeats_can_be_added(run):
    extended = EngineStarter()
    run(EngineStarter(), num_speculative_tokens="2")
    report = run(extended, methods="none,peagle,ngram", num_speculative_tokens="2", repeats=3)
    assert [spec.drafter.method if spec.drafter else "none" for spec in extended.specs] == ["none", "peagle", "ngram"]
    # Each repeat has 6 prompts at two concurrencies, and 1 + 3 warm-up requests.
    assert [len(engine.concurrencies) for engine in extended.engines] == [2 * 6 + 4] * 2 + [3 * (2 * 6 + 4)]
    assert {cell["repeats"] for cell in report["cells"]} == {3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 41}, "sampling.max_tokens: was 40, now 41"),
        ({"concurrency": "1,4"}, "max_num_seqs: was 3, now 4"),
        ({"limit": 3}, "dataset.content"),
        ({"system_prompt": "be brief"}, "dataset.prompts.system_prompt"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens: was None, now 512"),
        ({"load_format": "dummy"}, "load_format: was 'auto', now 'dummy'"),
    ],
)
def test_output_folder_with_another_fingerprint_is_refused(change, message, run):
    starter = EngineStarter()
    run(EngineStarter(), repeats=1)
    with pytest.raises(ConfigError, match=message):
        run(starter, repeats=1, **change)
    assert starter.specs == []


def test_report_names_the_model_runners(run, tmp_path):
    class StarterWithModelRunners(EngineStarter):
        def __call__(self, spec, hardware):
            engine = super().__call__(spec, hardware)
            engine.model_runner = "V1" if spec.drafter else "V2"
            return engine

    messages: list[str] = []
    report = run(StarterWithModelRunners(), repeats=1)
    assert [setup["model_runner"] for setup in report["setups"]] == ["V2", "V1", "V1"]
    note = "vLLM used different model runners: V1 ran P-EAGLE; V2 ran no speculation."
    assert note in (tmp_path / "out" / "report.md").read_text()
    run(EngineStarter(), messages, repeats=1)
    assert any(note in line for line in messages)


def test_progress_messages_have_the_remaining_time(run):
    messages: list[str] = []
    run(EngineStarter(), messages)
    assert "  12 passes in 5 engine starts; 0 already finished" in messages
    passes = [line for line in messages if line.startswith("[")]
    assert [line.split("]")[0] for line in passes] == [f"[{n}/12" for n in range(1, 13)]
    assert "[1/12] no speculation, concurrency 1, repeat 1: " in passes[0]
    assert all("left" in line for line in passes[:-1])
    assert "left" not in passes[-1]


def test_engines_with_other_synthetic_acceptance_are_measured_again(run, write_head_folder, monkeypatch):
    monkeypatch.setattr("peagle.hardware.detect", gpu)
    heads = [f"{method}={write_head_folder(method)}" for method in ("peagle", "eagle3")]
    options: dict[str, Any] = {"repeats": 1, "num_speculative_tokens": "2"}
    first, added, other, retry = EngineStarter(), EngineStarter(), EngineStarter(), EngineStarter()
    run(first, synthetic_acceptance=["peagle=2"], **options)
    two_heads = options | {"methods": "none,eagle3,peagle", "drafter": heads}
    report = run(added, synthetic_acceptance=["peagle=2", "eagle3=1.5"], **two_heads)
    assert [spec.drafter and spec.drafter.method for spec in added.specs] == ["eagle3"]
    assert [setup["synthetic_rates"] for setup in report["setups"]] == [None, [0.5, 0.0], [1.0, 0.0]]
    run(other, synthetic_acceptance=["peagle=2.5", "eagle3=1.5"], **two_heads)
    assert [spec.drafter and spec.drafter.synthetic_rates for spec in other.specs] == [(1.0, 0.5)]
    run(retry, synthetic_acceptance=["eagle3=1.5", "peagle=2"], **two_heads)
    assert retry.specs == []
    with pytest.raises(ConfigError, match="synthetic_acceptance: was 'by lot', now \\[\\]"):
        run(retry, **two_heads)


def test_speed_is_measured_if_the_engine_has_no_times_per_request(run):
    class WithoutRequestTimes(FakeEngine):
        """An engine that counts drafts, but not per request, and reports no times."""

        async def generate(self, *args):
            from dataclasses import replace

            return replace(await super().generate(*args), speculation=None, ttft_s=None, latency_s=None)

    report = run(
        lambda spec, _: WithoutRequestTimes(num_speculative_tokens=2), methods="peagle", num_speculative_tokens="2"
    )
    (cell, _) = report["cells"]
    assert (cell["acceptance_length"], cell["ttft_s"], cell["step_s"]) == (2.0, None, None)
    assert cell["output_tokens_per_s"] > 0
