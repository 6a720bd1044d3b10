"""A tuning, from its configuration to its profile.

    tune.json      what is measured, on what hardware; written once
    cells/         finished passes, and the engine time so far
    profile.yaml   the result, for `peagle generate --profile` and `peagle serve --profile`
    logs/          output of the engines

An engine has a method, K, precision and number of token slots. It is sized for the largest concurrency and serves all
of them, so one start measures several configurations. Passes run as in a benchmark. Repeats use other prompts; all
engines use the same ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from peagle.bench.config import as_benchmark
from peagle.bench.engine import MeasurementListener, Start
from peagle.bench.loop import Measurement, TokenizerOf
from peagle.bench.plan import BenchPlan, Pass, make_plan
from peagle.bench.prompts import BenchPrompt
from peagle.bench.record import PassRecord, summarise
from peagle.bench.setups import Setup
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_options import resolve_price
from peagle.economics.report.figures import format_duration
from peagle.engine.steps import check_slots, max_num_batched_tokens
from peagle.engine.vllm import start_engine
from peagle.hardware import Hardware
from peagle.profiles.profile import Profile, write_profile
from peagle.requests.tokenizer import load_tokenizer
from peagle.tuning.answer import answer
from peagle.tuning.config import AUTO, TuneConfig
from peagle.tuning.search import Candidate, Score, Search, Turn, score

_DEFAULT_SIZES = {"cpu": [1, 4, 16], "cuda": [8, 32, 128]}
_MIN_PROMPTS = 6  # per pass
_SPENT = "engine-time"


def tune(
    config: TuneConfig,
    listener: MeasurementListener,
    *,
    start: Start = start_engine,
    tokenizer_of: TokenizerOf = load_tokenizer,
) -> tuple[Profile, Path]:
    """Search until the answer is found or the budget is spent, and return the profile and its path."""
    run = Tuning.prepare(config, listener, start, tokenizer_of)
    run.measure()
    profile = answer(config, run.plan, run.dataset, run.search, run.records)
    path = config.profile_output or run.folder.root / "profile.yaml"
    write_profile(path, profile)
    return profile, path


def _with_slots(setup: Setup, slots: str, hardware: Hardware) -> Setup:
    """Return the engine with a fixed number of token slots. Its name contains precision and slots as requested."""
    precision = setup.spec.precision
    fixed = max_num_batched_tokens(setup.spec, hardware) if slots == AUTO else int(slots)
    spec = replace(setup.spec, max_num_batched_tokens=fixed)
    check_slots(spec)
    marks = ["" if precision == AUTO else f", {precision}", "" if slots == AUTO else f", {slots} slots"]
    return replace(setup, name=f"{setup.name}-{precision}-{slots}", label="".join([setup.label, *marks]), spec=spec)


class Tuning(Measurement):
    """The passes of a search, including earlier commands.

    Attributes:
        records: finished passes by configuration.
    """

    name = "tune"
    parent = Path("runs/tune")

    @staticmethod
    def make_plan(config: TuneConfig, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
        """Return every engine, checked: those of a benchmark, for each precision and number of token slots."""
        if config.objective == "tokens-per-dollar":
            resolve_price(config, hardware)  # required here, unlike in a benchmark
        sizes = config.max_num_seqs or _DEFAULT_SIZES[hardware.platform]
        varied = config.model_dump(include={"methods", "drafter", "num_speculative_tokens"})
        plans = [
            make_plan(as_benchmark(config, **varied, concurrency=sizes, precision=precision), hardware, model)
            for precision in config.precision
        ]
        own = {name: value for name, value in plans[0].own.items() if name != "precision"} | {"waves": config.waves}
        cache = config.kv_cache_precision  # included only if set, like additional keys of a benchmark
        return replace(
            plans[0],
            setups=[
                _with_slots(setup, slots, hardware)
                for plan in plans
                for slots in config.max_num_batched_tokens
                for setup in plan.setups
            ],
            notes=list(dict.fromkeys(note for plan in plans for note in plan.notes)),
            own=own | ({"kv_cache_precision": cache} if cache != AUTO else {}),
        )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.records: dict[Candidate, list[PassRecord]] = {}
        self._setups = {setup.name: setup for setup in self.plan.setups}
        candidates = [
            Candidate(engine=setup.name, concurrency=size, drafts=setup.drafter is not None)
            for setup in self.plan.setups
            for size in self.plan.config.concurrency
        ]
        self._budget_s = self.config.budget_min * 60
        self.spent_s = self.folder.find(_SPENT, lambda kept: float(kept["engine_s"])) or 0.0
        self.search = Search(candidates, score=self._score, budget_s=self._budget_s, spent_s=self.spent_s)
        for candidate in candidates:
            self._load(candidate)

    def next(self, up: Setup | None = None) -> Pass | None:
        turn = self.search.next(up.name if up else None)
        return None if turn is None else self._pass(turn)

    def prompts(self, one: Pass) -> Sequence[BenchPrompt]:
        return prompts_of(self.dataset.prompts, concurrency=one.concurrency, waves=self.config.waves, repeat=one.repeat)

    def accept(self, one: Pass, record: PassRecord) -> None:
        super().accept(one, record)
        turn = _turn(one)
        self.records.setdefault(turn.candidate, []).append(record)
        self.search.add(turn, start_s=record.start_s, pass_s=record.wall_s)

    def fail(self, setup: Setup, reason: str) -> None:
        super().fail(setup, reason)
        self.search.fail(setup.name, reason)

    def spend(self, spent_s: float) -> None:
        super().spend(spent_s)
        self.search.spent_s = spent_s
        self.folder.keep(_SPENT, {"engine_s": spent_s})

    def standing(self) -> str:
        return (
            f"{len(self.search.candidates)} configurations on {len(self._setups)} engines; {len(self.done)} passes are "
            f"finished, after {format_duration(self.spent_s)} of {format_duration(self._budget_s)}"
        )

    def words(self, one: Pass, record: PassRecord) -> str:
        left_s = max(self._budget_s - self.spent_s, 0.0)
        rest_s = min(self.search.pending_s(one.setup.name), left_s)
        spent = f"{format_duration(self.spent_s)} of {format_duration(self._budget_s)}"
        return (
            f"{spent}: {one.setup.label}, {one.concurrency} at once, pass {one.repeat + 1}: "
            f"{record.output_tokens_per_s:.1f} output tokens/s; about {format_duration(rest_s)} left"
        )

    def _load(self, candidate: Candidate) -> None:
        for repeat in count():
            one = self._pass(Turn(candidate=candidate, repeat=repeat))
            record = self.find(one)
            if record is None:
                return
            self.accept(one, record)

    def _pass(self, turn: Turn) -> Pass:
        candidate = turn.candidate
        return Pass(setup=self._setups[candidate.engine], concurrency=candidate.concurrency, repeat=turn.repeat)

    def _score(self, candidate: Candidate, num_passes: int | None) -> Score | None:
        records = self.records.get(candidate, [])[:num_passes]
        return score(summarise(records, usd_per_s=self.plan.usd_per_s), self.config) if records else None


def prompts_of(prompts: Sequence[BenchPrompt], *, concurrency: int, waves: int, repeat: int) -> list[BenchPrompt]:
    """Return the prompts of a pass. Each repeat continues where the previous one ended, cyclically."""
    num = max(concurrency * waves, _MIN_PROMPTS)
    return [prompts[(repeat * num + index) % len(prompts)] for index in range(num)]


def _turn(one: Pass) -> Turn:
    setup = one.setup
    candidate = Candidate(engine=setup.name, concurrency=one.concurrency, drafts=setup.drafter is not None)
    return Turn(candidate=candidate, repeat=one.repeat)
