"""Complete runs of `peagle tune` with fake engines.

The engines' times per token differ so much that other load on the machine does not change their order.
"""

import json

import pytest
from config_only import write_head, write_target

from peagle.bench.engine import MeasurementListener
from peagle.bench.prompts import BenchPrompt
from peagle.catalog.folders import folder_fingerprint
from peagle.engine.fake import ByteTokenizer, FakeEngine, FakeTraits
from peagle.engine.spec import EngineSpec
from peagle.errors import ConfigError, EngineError, PriceError
from peagle.profiles.profile import read_profile
from peagle.tuning.config import TuneConfig
from peagle.tuning.run import prompts_of, tune

ROWS = [{"prompt": f"prompt {i}"} for i in range(9)]
FAST, SLOW = 0.001, 0.006  # seconds per token


class FakeEngineStarter:
    """Starts fake engines with the given seconds per token by K, and records their specs.

    Engines with a K in `broken` do not start. Request number `interrupted_at` raises KeyboardInterrupt.
    """

    def __init__(self, token_s, *, broken=(), interrupted_at=None):
        self.specs: list[EngineSpec] = []
        self.num_requests = 0
        self._token_s, self._broken, self._interrupted_at = token_s, broken, interrupted_at

    def __call__(self, spec, hardware):
        self.specs.append(spec)
        k = spec.drafter.num_speculative_tokens if spec.drafter else 0
        if k in self._broken:
            raise EngineError(f"K={k} does not start")
        starter = self

        class CountingEngine(FakeEngine):
            async def generate(self, *args):
                starter.num_requests += 1
                if starter.num_requests == starter._interrupted_at:
                    raise KeyboardInterrupt
                return await super().generate(*args)

        return CountingEngine(FakeTraits(token_s=self._token_s[k]), num_speculative_tokens=k)

    @property
    def ks(self):
        return [spec.drafter.num_speculative_tokens if spec.drafter else 0 for spec in self.specs]


@pytest.fixture
def run(tmp_path, write_jsonl):
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")

    def run(starter, messages=None, **options):
        values = {
            "model": str(target), "dataset": str(write_jsonl(ROWS)), "output": tmp_path / "out", "max_tokens": 24,
            "drafter": f"peagle={head}", "num_speculative_tokens": "2,4", "max_num_seqs": "1,3", "requests_per_slot": 2,
            "usd_per_hour": 3.6,
        } | options  # fmt: skip
        listener = MeasurementListener(say=(messages if messages is not None else []).append)
        profile, path = tune(TuneConfig(**values), listener, start=starter, tokenizer_of=lambda *_: ByteTokenizer())
        assert read_profile(path) == profile
        return profile

    return run


def test_fastest_configuration_becomes_the_profile(run, tmp_path):
    starter = FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW})
    profile = run(starter)
    assert starter.ks[:3] == [0, 2, 4]
    assert {spec.max_num_seqs for spec in starter.specs} == {3}
    assert profile.engine["drafter"] == str(tmp_path / "head")
    assert (profile.engine["num_speculative_tokens"], profile.engine["max_num_seqs"]) == (2, 3)
    assert profile.engine["max_num_batched_tokens"] == 2048 + 3 * 2 * 2  # prefill + requests x 2 K
    assert profile.decision.startswith("P-EAGLE K=2: ")
    assert "times the best speed without a drafter" in profile.decision
    assert (profile.chosen.k, profile.chosen.concurrency) == (2, 3)
    assert profile.chosen.head_fingerprint == folder_fingerprint(tmp_path / "head")
    assert {cell.head_fingerprint for cell in profile.measurements if not cell.has_drafter} == {None}
    assert len(profile.measurements) == 6
    assert profile.tuned.concurrency == 3
    assert profile.target.name == str(tmp_path / "target") or profile.target.revision
    assert (tmp_path / "out" / "profile.yaml").exists()


def test_engines_choose_what_to_verify_unless_fixed_values_of_k_are_compared(run, tmp_path):
    starter = FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW})
    assert run(starter).engine["verify"] == "auto"
    assert {spec.drafter.verify for spec in starter.specs if spec.drafter} == {"auto"}
    starter = FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW})
    assert run(starter, verify="all", output=tmp_path / "fixed").engine["verify"] == "all"
    assert {spec.drafter.verify for spec in starter.specs if spec.drafter} == {"all"}


def test_no_speculation_can_be_the_result(run):
    profile = run(FakeEngineStarter({0: FAST, 2: SLOW, 4: SLOW}))
    assert profile.engine["drafter"] == "none"
    assert "num_speculative_tokens" not in profile.engine
    assert profile.decision.startswith("No speculation: ")
    assert profile.tuned.acceptance_length is None


def test_engine_options_reach_engines_and_profile(run):
    options = {"kv_cache_precision": "bf16", "engine_args": "block_size=32", "draft_kv_cache_precision": "bf16"}
    starter = FakeEngineStarter({0: SLOW, 2: FAST})
    engine = run(starter, num_speculative_tokens="2", precision="bf16", **options).engine
    assert {(spec.kv_cache_precision, spec.extra["block_size"]) for spec in starter.specs} == {("bf16", 32)}
    assert {spec.drafter.kv_cache_precision for spec in starter.specs if spec.drafter} == {"bf16"}
    assert {name: engine[name] for name in options} == {**options, "engine_args": {"block_size": 32}}


def test_interrupted_tuning_resumes(run, tmp_path):
    speeds = {0: SLOW, 2: FAST, 4: SLOW}
    with pytest.raises(KeyboardInterrupt):
        run(FakeEngineStarter(speeds, interrupted_at=30))
    cells = tmp_path / "out" / "cells"
    finished_passes = {file.name: file.read_bytes() for file in cells.glob("*-r*.json")}
    assert finished_passes
    spent_s = json.loads((cells / "engine-time.json").read_text())["engine_s"]
    assert spent_s > 0
    starter = FakeEngineStarter(speeds)
    profile = run(starter)
    assert profile.engine["num_speculative_tokens"] == 2
    assert all((cells / name).read_bytes() == data for name, data in finished_passes.items())
    assert json.loads((cells / "engine-time.json").read_text())["engine_s"] > spent_s
    unused_starter = FakeEngineStarter(speeds)
    assert run(unused_starter).measurements == profile.measurements
    assert unused_starter.specs == []


def test_tuning_within_a_spent_budget_returns_the_best_result_so_far(run):
    messages: list[str] = []
    profile = run(FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW}), messages, time_budget_s=0.15)
    assert {cell.method for cell in profile.measurements} == {"none"}
    assert profile.decision.endswith("; no drafter was measured.")
    assert profile.notes[0].startswith("Not measured within the budget: ")
    assert profile.notes[0].endswith(
        "P-EAGLE K=2, verify auto; P-EAGLE K=4, verify auto. Increase --time-budget-s to continue with them."
    )
    starter = FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW})
    assert run(starter).engine["num_speculative_tokens"] == 2  # without a budget
    assert starter.ks[0] in (0, 2)


def test_latency_limit_excludes_faster_configurations(run):
    # At concurrency 40, the engine generates more tokens per second, but exceeds the latency limit.
    class SlowerUnderLoad(FakeEngine):
        running = 0

        async def generate(self, *args):
            self.running += 1
            self._traits = FakeTraits(token_s=0.001 if self.running == 1 else 0.012)
            try:
                return await super().generate(*args)
            finally:
                self.running -= 1

    def start_engine(spec, hardware):
        return SlowerUnderLoad(num_speculative_tokens=spec.drafter.num_speculative_tokens if spec.drafter else 0)

    options = {
        "methods": "none",
        "num_speculative_tokens": "2",
        "drafter": [],
        "max_num_seqs": "1,40",
        "requests_per_slot": 1,
    }
    assert run(start_engine, **options).engine["max_num_seqs"] == 40
    profile = run(start_engine, objective="throughput", max_tpot_ms=8, **options)
    assert profile.engine["max_num_seqs"] == 1
    assert "p95 time per output token within 8 ms" in profile.decision
    assert profile.decision.endswith("; no drafter was measured."), "the latency limit is not the reason"


def test_impossible_limits_are_an_error(run):
    with pytest.raises(ConfigError, match=r"the nearest is .* with concurrency 1: p95 time per output token [\d.]+ ms"):
        run(FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW}), max_tpot_ms=0.01, objective="throughput", max_num_seqs="1")


def test_failed_engine_is_excluded(run):
    messages: list[str] = []
    profile = run(FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW}, broken=(2,)), messages)
    assert profile.engine.get("num_speculative_tokens") != 2
    assert profile.notes == ["P-EAGLE K=2, verify auto could not be measured: K=2 does not start"]
    assert "  skipping P-EAGLE K=2, verify auto: K=2 does not start" in messages


@pytest.mark.parametrize("both_crash", [False, True])
def test_finished_passes_of_a_crashed_engine_are_kept(both_crash, run):
    class CrashesWithThreeRequests(FakeEngine):
        running = 0

        async def generate(self, *args):
            self.running += 1
            if self.running == 3:
                raise EngineError("out of memory")
            try:
                return await super().generate(*args)
            finally:
                self.running -= 1

    def start_engine(spec, hardware):
        k = spec.drafter.num_speculative_tokens if spec.drafter else 0
        traits = FakeTraits(token_s=FAST if k else 10 * SLOW)
        return (CrashesWithThreeRequests if k or both_crash else FakeEngine)(traits, num_speculative_tokens=k)

    profile = run(start_engine, num_speculative_tokens="2", max_tokens=8)
    assert (profile.engine["num_speculative_tokens"], profile.engine["max_num_seqs"]) == (2, 1)
    assert "P-EAGLE K=2, verify auto could only in part be measured: out of memory" in profile.notes


def test_progress_has_the_remaining_time(run):
    messages: list[str] = []
    run(FakeEngineStarter({0: SLOW, 2: FAST, 4: SLOW}), messages)
    assert any("6 configurations on 3 engines; 0 passes are finished" in line for line in messages)
    passes = [line for line in messages if "output tokens/s; about" in line]
    assert len(passes) >= 6
    assert all(line.endswith(" left") for line in passes)


def test_batched_tokens_and_precisions_have_separate_engines(run):
    starter = FakeEngineStarter({0: FAST, 2: SLOW})
    options = {"num_speculative_tokens": "2", "max_num_batched_tokens": "auto,512", "precision": "auto,float32"}
    profile = run(starter, **options)
    assert {(spec.precision, spec.max_num_batched_tokens) for spec in starter.specs} == {
        (precision, num_tokens) for precision in ("auto", "float32") for num_tokens in (2048 + 3, 2048 + 12, 512)
    }
    assert {cell.precision for cell in profile.measurements} == {"auto", "float32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 25}, "sampling.max_tokens"),
        ({"requests_per_slot": 3}, "requests_per_slot: was 2"),
        ({"max_num_seqs": "1,4"}, "max_num"),
    ],
)
def test_changed_options_are_refused_on_resume(change, message, run):
    unused_starter = FakeEngineStarter({})
    run(FakeEngineStarter({0: FAST, 2: SLOW, 4: SLOW}))
    with pytest.raises(ConfigError, match=message):
        run(unused_starter, **change)
    assert unused_starter.specs == []


@pytest.mark.parametrize(
    ("options", "error", "message", "hint"),
    [
        ({"dataset": "nothing.jsonl"}, ConfigError, "nothing.jsonl: no such file", "humaneval"),
        ({"max_num_batched_tokens": "12"}, ConfigError, "12 leaves no room for prompts", "use more than"),
        ({"drafter": "peagle=/nowhere"}, ConfigError, "no such drafter: /nowhere", "folder"),
        ({"usd_per_hour": None, "instance_type": "c7a.lage"}, PriceError, "no price for the instance", "c7a.large"),
    ],
)
def test_invalid_options_are_refused_before_an_engine_starts(options, error, message, hint, run):
    starter = FakeEngineStarter({})
    with pytest.raises(error, match=message) as exception:
        run(starter, **options)
    assert hint in exception.value.hint
    assert starter.specs == []


def test_repeats_use_the_next_prompts():
    sample = [BenchPrompt(token_ids=[n], category=None) for n in range(10)]

    def ids(repeat):
        return [prompt.token_ids[0] for prompt in prompts_of(sample, concurrency=4, requests_per_slot=2, repeat=repeat)]

    assert ids(0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ids(1) == [8, 9, 0, 1, 2, 3, 4, 5]
    assert len(prompts_of(sample, concurrency=1, requests_per_slot=1, repeat=0)) == 6  # the minimum
