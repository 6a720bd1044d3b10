"""A tuning run, from its configuration to its profile.

    tune.json      settings and hardware; written once
    cells/         finished passes, and the engine time
    profile.yaml   the result, for `peagle generate --profile` and `peagle serve --profile`
    logs/          output of the engines

An engine has a method, K, precision and number of token slots (`max_num_batched_tokens`). It is sized for the largest
concurrency and also serves smaller concurrencies, so several configurations are measured with one start. Each repeat
uses other prompts; in the same repeat, all engines use the same prompts.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from peagle.bench.config import as_benchmark
from peagle.bench.engine import MeasurementListener, StartEngine
from peagle.bench.loop import Measurement, TokenizerOf
from peagle.bench.plan import BenchPlan, Pass, Setup, make_plan
from peagle.bench.prompts import BenchPrompt, Dataset
from peagle.bench.record import PassRecord, summarise
from peagle.catalog.cards import absolute_model_name
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_options import resolve_price
from peagle.economics.report.figures import format_count, format_duration
from peagle.engine.keys import DRAFTER_KEYS, TARGET_ENGINE_OPTIONS
from peagle.engine.steps import check_slots, max_num_batched_tokens
from peagle.engine.vllm import start_engine
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from peagle.profiles.measurements import METHOD_NAMES, method_label
from peagle.profiles.profile import ENGINE_KEYS, MeasuredCell, Profile, Tuned, TunedTarget, write_profile
from peagle.provenance import versions
from peagle.requests.tokenizer import load_tokenizer
from peagle.tables import aligned
from peagle.tuning.config import AUTO, TuneConfig
from peagle.tuning.search import MIN_GAIN, P95, Candidate, CandidatePass, Score, Search, excesses, score

# By field of a summary: the field in words, and the option that limits it.
_LIMITS = {"tpot_s": ("time per output token", "max_tpot_ms"), "ttft_s": ("time to the first token", "max_ttft_ms")}


def make_profile(
    config: TuneConfig,
    plan: BenchPlan,
    dataset: Dataset,
    search: Search,
    records: Mapping[Candidate, Sequence[PassRecord]],
) -> Profile:
    setups = {setup.name: setup for setup in plan.setups}
    summaries = {candidate: summarise(passes, usd_per_s=plan.usd_per_s) for candidate, passes in records.items()}
    best = search.best()
    if best is None:
        raise _no_result_error(config, setups, search, summaries)
    best_first = [best, *(candidate for candidate in search.ranked() if candidate != best)]
    cells = [_cell(config, setups[candidate.engine], summaries[candidate]) for candidate in best_first]
    return Profile(
        peagle_profile=1,
        decision=_decision(config, cells),
        objective=config.goal(),
        engine=_engine_options(config, setups[best.engine], cells[0]),
        tuned=Tuned(concurrency=cells[0].concurrency, acceptance_length=cells[0].acceptance_length),
        target=TunedTarget(name=plan.model.name, revision=plan.model.fingerprint or "unknown"),
        hardware=plan.hardware.describe(),
        versions=versions(),
        dataset={"name": dataset.name, "content": dataset.fingerprint, "num_prompts": len(dataset.prompts)}
        | config.sampling(),
        price=plan.price.to_dict() if plan.price else None,
        made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine_minutes=round(search.spent_s / 60, 2),
        notes=_notes(setups, search),
        measurements=cells,
    )


def text_table(profile: Profile) -> str:
    speed_columns = ("output tokens/s", "tokens per $", "p95 TPOT ms", "p95 TTFT ms")
    rows = [["", "K", "concurrency", *speed_columns, "acceptance", "passes"]]
    for cell in profile.measurements:
        rows.append(
            [
                METHOD_NAMES[cell.method] + ("" if cell.precision == "auto" else f" {cell.precision}"),
                str(cell.k or "-"),
                str(cell.concurrency),
                f"{cell.output_tokens_per_s:,.1f}",
                "-" if cell.tokens_per_usd is None else format_count(cell.tokens_per_usd),
                *("-" if times is None else f"{times[P95] * 1000:,.1f}" for times in (cell.tpot_s, cell.ttft_s)),
                "-" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
                str(cell.repeats),
            ]
        )
    return "\n".join([*aligned(rows), "", profile.decision, *profile.notes])


def _engine_options(config: TuneConfig, setup: Setup, cell: MeasuredCell) -> dict[str, Any]:
    names = {"kv_cache_precision", *TARGET_ENGINE_OPTIONS} - (set() if cell.has_drafter else set(DRAFTER_KEYS))
    options = config.model_dump(include=names) | {
        "model": absolute_model_name(config.model),
        "drafter": cell.drafter,
        "num_speculative_tokens": cell.k or None,
        "precision": cell.precision,
        "max_num_seqs": cell.concurrency,
        "max_num_batched_tokens": cell.max_num_batched_tokens,
        "verify": setup.drafter.verify if setup.drafter else None,
    }
    return {name: options[name] for name in ENGINE_KEYS if options.get(name) is not None}


def _cell(config: TuneConfig, setup: Setup, summary: Mapping[str, Any]) -> MeasuredCell:
    return MeasuredCell(
        **summary,
        precision=setup.spec.precision,
        max_num_batched_tokens=setup.spec.max_num_batched_tokens,
        drafter=setup.drafter.model if setup.drafter and setup.method in config.heads else setup.method,
        head_fingerprint=setup.fingerprint or None,
    )


def _decision(config: TuneConfig, cells: Sequence[MeasuredCell]) -> str:
    chosen = cells[0]
    limits = {"max_tpot_ms": config.max_tpot_ms, "max_ttft_ms": config.max_ttft_ms}
    alternatives = (cell for cell in cells[1:] if cell.has_drafter != chosen.has_drafter and cell.is_within(**limits))
    alternative = next(alternatives, None)
    speed = f"{chosen.output_tokens_per_s:.1f} output tokens/s, concurrency {chosen.concurrency}{_limits_text(config)}"
    if chosen.has_drafter:
        label = method_label(chosen.method, chosen.k)
        if alternative is None:
            return f"{label}: {speed}."
        gain = chosen.output_tokens_per_s / alternative.output_tokens_per_s
        comparison = f"the best speed without a drafter, at concurrency {alternative.concurrency}"
        return f"{label}: {speed}; {gain:.2f} times {comparison}."
    if alternative is not None:
        gain = alternative.output_tokens_per_s / chosen.output_tokens_per_s
        comparison = (
            f"the best with a drafter, {method_label(alternative.method, alternative.k)} at concurrency "
            f"{alternative.concurrency}, has {gain:.2f} times that speed (a drafter must be "
            f"at least {MIN_GAIN:.0%} faster)"
        )
    elif any(cell.has_drafter for cell in cells):
        comparison = "no drafter is within the limits"
    else:
        comparison = "no drafter was measured"
    return f"No speculation: {speed}; {comparison}."


def _limits_text(config: TuneConfig) -> str:
    limits = {
        f"p95 {label} within {limit:g} ms"
        for label, name in _LIMITS.values()
        if (limit := getattr(config, name)) is not None
    }
    return f", {' and '.join(sorted(limits))}" if limits else ""


def _no_result_error(
    config: TuneConfig, setups: Mapping[str, Setup], search: Search, summaries: Mapping[Candidate, Mapping[str, Any]]
) -> ConfigError:
    ranked = search.ranked()
    if not ranked:
        return ConfigError(
            f"the budget of {config.time_budget_s:g} engine seconds was spent before any pass finished",
            hint="increase --time-budget-s and repeat the command to continue",
        )
    nearest_summary, nearest_setup = summaries[ranked[0]], setups[ranked[0].engine]
    exceeded = [
        f"p95 {_LIMITS[name][0]} {nearest_summary[name][P95] * 1000:.1f} ms"
        if nearest_summary[name]
        else f"no {_LIMITS[name][0]}"
        for name, excess in excesses(nearest_summary, config).items()
        if excess > 0
    ]
    return ConfigError(
        f"no configuration is within the limits{_limits_text(config)}; the nearest is {nearest_setup.label} with "
        f"concurrency {ranked[0].concurrency}: {' and '.join(exceeded)}",
        hint="relax the limits, or try fewer concurrent requests with --max-num-seqs, or other hardware; "
        "measurements are reused",
    )


def _notes(setups: Mapping[str, Setup], search: Search) -> list[str]:
    measured_engines = {candidate.engine for candidate in search.ranked()}
    notes = [
        f"{setups[name].label} could {'only in part' if name in measured_engines else 'not'} be measured: {reason}"
        for name, reason in search.failed.items()
    ]
    unmeasured = [planned.candidate for planned in search.pending() if not planned.repeat]
    engines = dict.fromkeys(setups[candidate.engine].label for candidate in unmeasured)
    if engines:
        names = "; ".join(engines)
        notes.append(f"Not measured within the budget: {names}. Increase --time-budget-s to continue with them.")
    return notes


_ENGINE_TIME = "engine-time"  # file in `cells/`
_MIN_PROMPTS = 6  # per pass


def tune(
    config: TuneConfig,
    listener: MeasurementListener,
    *,
    start: StartEngine = start_engine,
    tokenizer_of: TokenizerOf = load_tokenizer,
) -> tuple[Profile, Path]:
    """Search until everything is measured or the budget is spent, and return the profile and its path."""
    tuning = Tuning.prepare(config, listener, start, tokenizer_of)
    tuning.measure()
    profile = make_profile(config, tuning.plan, tuning.dataset, tuning.search, tuning.records)
    path = config.profile_output or tuning.folder.root / "profile.yaml"
    write_profile(path, profile)
    return profile, path


def _with_token_slots(setup: Setup, slots: str, hardware: Hardware) -> Setup:
    """Return the engine with a fixed number of token slots, and with the requested precision and slots in its name."""
    precision = setup.spec.precision
    num_slots = max_num_batched_tokens(setup.spec, hardware) if slots == AUTO else int(slots)
    spec = replace(setup.spec, max_num_batched_tokens=num_slots)
    check_slots(spec)
    suffixes = ["" if precision == AUTO else f", {precision}", "" if slots == AUTO else f", {slots} slots"]
    return replace(setup, name=f"{setup.name}-{precision}-{slots}", label="".join([setup.label, *suffixes]), spec=spec)


class Tuning(Measurement):
    """The passes of a search, including those of earlier commands."""

    name = "tune"
    parent = Path("runs/tune")

    @staticmethod
    def make_plan(config: TuneConfig, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
        """Return the plan of the engines to measure, for each precision and number of token slots."""
        if config.objective == "tokens-per-dollar":
            resolve_price(config, hardware)  # raises an error without a price, which a benchmark does not need
        concurrencies = config.max_num_seqs or {"cpu": [1, 4, 16], "cuda": [8, 32, 128]}[hardware.platform]
        # On GPUs, a `verify` that is passed on counts as the user's choice.
        sets_verify = hardware.platform == "cpu" or "verify" in config.model_fields_set
        names = {"methods", "drafter", "num_speculative_tokens"} | ({"verify"} if sets_verify else set())
        varied = config.model_dump(include=names)
        plans = [
            make_plan(as_benchmark(config, **varied, concurrency=concurrencies, precision=precision), hardware, model)
            for precision in config.precision
        ]
        command_settings = {name: value for name, value in plans[0].command_settings.items() if name != "precision"} | {
            "waves": config.requests_per_slot
        }
        kv_precision = config.kv_cache_precision  # stored only if set, so that existing folders stay valid
        return replace(
            plans[0],
            setups=[
                _with_token_slots(setup, slots, hardware)
                for plan in plans
                for slots in config.max_num_batched_tokens
                for setup in plan.setups
            ],
            notes=list(dict.fromkeys(note for plan in plans for note in plan.notes)),
            command_settings=command_settings | ({"kv_cache_precision": kv_precision} if kv_precision != AUTO else {}),
        )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.records: dict[Candidate, list[PassRecord]] = {}
        self._setups = {setup.name: setup for setup in self.plan.setups}
        candidates = [
            Candidate(engine=setup.name, concurrency=concurrency, has_drafter=setup.drafter is not None)
            for setup in self.plan.setups
            for concurrency in self.plan.config.concurrency
        ]
        self._budget_s = self.config.time_budget_s
        self.spent_s = self.folder.find(_ENGINE_TIME, lambda stored: float(stored["engine_s"])) or 0.0
        self.search = Search(candidates, score=self._score, budget_s=self._budget_s, spent_s=self.spent_s)
        for candidate in candidates:
            for repeat in count():
                planned = self._pass(CandidatePass(candidate=candidate, repeat=repeat))
                record = self.find(planned)
                if record is None:
                    break
                self.add_pass(planned, record)

    def next(self, running: Setup | None = None) -> Pass | None:
        planned = self.search.next(running.name if running else None)
        return None if planned is None else self._pass(planned)

    def prompts(self, planned: Pass) -> Sequence[BenchPrompt]:
        return prompts_of(
            self.dataset.prompts,
            concurrency=planned.concurrency,
            requests_per_slot=self.config.requests_per_slot,
            repeat=planned.repeat,
        )

    def add_pass(self, planned: Pass, record: PassRecord) -> None:
        super().add_pass(planned, record)
        setup = planned.setup
        candidate = Candidate(engine=setup.name, concurrency=planned.concurrency, has_drafter=setup.drafter is not None)
        self.records.setdefault(candidate, []).append(record)
        self.search.add(
            CandidatePass(candidate=candidate, repeat=planned.repeat), start_s=record.start_s, pass_s=record.wall_s
        )

    def fail(self, setup: Setup, reason: str) -> None:
        super().fail(setup, reason)
        self.search.fail(setup.name, reason)

    def set_spent(self, spent_s: float) -> None:
        super().set_spent(spent_s)
        self.search.spent_s = spent_s
        self.folder.save(_ENGINE_TIME, {"engine_s": spent_s})

    def describe_progress(self) -> str:
        return (
            f"{len(self.search.candidates)} configurations on {len(self._setups)} engines; {len(self.done)} passes are "
            f"finished, after {format_duration(self.spent_s)} of {format_duration(self._budget_s)}"
        )

    def describe_pass(self, planned: Pass, record: PassRecord) -> str:
        remaining_s = min(self.search.pending_s(planned.setup.name), max(self._budget_s - self.spent_s, 0.0))
        spent = f"{format_duration(self.spent_s)} of {format_duration(self._budget_s)}"
        return (
            f"{spent}: {planned.setup.label}, concurrency {planned.concurrency}, pass {planned.repeat + 1}: "
            f"{record.output_tokens_per_s:.1f} output tokens/s; about {format_duration(remaining_s)} left"
        )

    def _pass(self, planned: CandidatePass) -> Pass:
        candidate = planned.candidate
        return Pass(setup=self._setups[candidate.engine], concurrency=candidate.concurrency, repeat=planned.repeat)

    def _score(self, candidate: Candidate, num_passes: int | None) -> Score | None:
        records = self.records.get(candidate, [])[:num_passes]
        return score(summarise(records, usd_per_s=self.plan.usd_per_s), self.config) if records else None


def prompts_of(
    prompts: Sequence[BenchPrompt], *, concurrency: int, requests_per_slot: int, repeat: int
) -> list[BenchPrompt]:
    """Return the prompts of a pass. Each repeat continues where the previous one ended, cyclically."""
    num_prompts = max(concurrency * requests_per_slot, _MIN_PROMPTS)
    return [prompts[(repeat * num_prompts + index) % len(prompts)] for index in range(num_prompts)]
