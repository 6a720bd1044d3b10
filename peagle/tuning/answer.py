"""The result of a tuning: decision, profile and table."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.plan import BenchPlan
from peagle.bench.prompts import Dataset
from peagle.bench.record import PassRecord, summarise
from peagle.bench.setups import Setup
from peagle.catalog.cards import lasting_name
from peagle.catalog.targets import ResolvedModel
from peagle.economics.report.figures import format_count
from peagle.engine.keys import DRAFTER_KEYS, TARGET_SIZES
from peagle.errors import ConfigError
from peagle.profiles.measurements import METHOD_NAMES, method_label
from peagle.profiles.profile import ENGINE_KEYS, MeasuredCell, Profile, Tuned, TunedTarget
from peagle.provenance import versions
from peagle.tables import aligned
from peagle.tuning.config import TuneConfig
from peagle.tuning.search import P95, WORTH, Candidate, Search, excesses

_LIMITS = {"tpot_s": ("time per output token", "max_tpot_ms"), "ttft_s": ("time to the first token", "max_ttft_ms")}


def answer(
    config: TuneConfig,
    plan: BenchPlan,
    dataset: Dataset,
    search: Search,
    records: Mapping[Candidate, Sequence[PassRecord]],
) -> Profile:
    setups = {setup.name: setup for setup in plan.setups}
    summaries = {candidate: summarise(found, usd_per_s=plan.usd_per_s) for candidate, found in records.items()}
    best = search.best()
    if best is None:
        raise _nothing_fits(config, setups, search, summaries)
    ordered = [best, *(candidate for candidate in search.ranked() if candidate != best)]
    cells = [_cell(config, setups[candidate.engine], summaries[candidate]) for candidate in ordered]
    return Profile(
        peagle_profile=1,
        decision=_decision(config, cells),
        objective=config.goal(),
        engine=_engine_keys(config, cells[0]),
        tuned=Tuned(concurrency=cells[0].concurrency, acceptance_length=cells[0].acceptance_length),
        target=TunedTarget(name=plan.model.name, revision=_revision(plan.model)),
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
    rows = [
        ["", "K", "at once", "output tokens/s", "tokens per $", "p95 TPOT ms", "p95 TTFT ms", "acceptance", "passes"]
    ]
    for cell in profile.measurements:
        rows.append(
            [
                METHOD_NAMES[cell.method] + ("" if cell.precision == "auto" else f" {cell.precision}"),
                str(cell.k or "-"),
                str(cell.concurrency),
                f"{cell.output_tokens_per_s:,.1f}",
                "-" if cell.tokens_per_usd is None else format_count(cell.tokens_per_usd),
                *("-" if found is None else f"{found[P95] * 1000:,.1f}" for found in (cell.tpot_s, cell.ttft_s)),
                "-" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
                str(cell.repeats),
            ]
        )
    return "\n".join([*aligned(rows), "", profile.decision, *profile.notes])


def _engine_keys(config: TuneConfig, cell: MeasuredCell) -> dict[str, Any]:
    """Return the engine options of the choice; drafter options only if it drafts."""
    names = {"kv_cache_precision", *TARGET_SIZES} - (set() if cell.drafts else set(DRAFTER_KEYS))
    keys = config.model_dump(include=names) | {
        "model": lasting_name(config.model),
        "drafter": cell.drafter,
        "num_speculative_tokens": cell.k or None,
        "precision": cell.precision,
        "max_num_seqs": cell.concurrency,
        "max_num_batched_tokens": cell.max_num_batched_tokens,
    }
    return {name: keys[name] for name in ENGINE_KEYS if keys.get(name) is not None}


def _cell(config: TuneConfig, setup: Setup, summary: Mapping[str, Any]) -> MeasuredCell:
    return MeasuredCell(
        **summary,
        precision=setup.spec.precision,
        max_num_batched_tokens=setup.spec.max_num_batched_tokens,
        drafter=_drafter(config, setup),
        head_fingerprint=setup.fingerprint or None,
    )


def _drafter(config: TuneConfig, setup: Setup) -> str:
    """Return the value of --drafter: the configured head, or the method from the catalog."""
    return setup.drafter.model if setup.drafter and setup.method in config.heads else setup.method


def _decision(config: TuneConfig, cells: Sequence[MeasuredCell]) -> str:
    chosen = cells[0]
    others = [cell for cell in cells[1:] if cell.drafts != chosen.drafts and _is_within(cell, config)]
    limits = _limits_in_words(config)
    speed = f"{chosen.output_tokens_per_s:.1f} output tokens/s, {chosen.concurrency} at once{limits}"
    if not chosen.drafts:
        against = (
            f"; the best with a drafter, {method_label(others[0].method, others[0].k)} at {others[0].concurrency}, has "
            f"{others[0].output_tokens_per_s / chosen.output_tokens_per_s:.2f} times that (a drafter must win by "
            f"{WORTH:.0%})"
            if others
            else "; no drafter is within the limits"
            if any(cell.drafts for cell in cells)
            else "; no drafter was measured"
        )
        return f"No speculation: {speed}{against}."
    against = (
        f"; {chosen.output_tokens_per_s / others[0].output_tokens_per_s:.2f} times the best without speculation, at "
        f"{others[0].concurrency}"
        if others
        else ""
    )
    return f"{method_label(chosen.method, chosen.k)}: {speed}{against}."


def _is_within(cell: MeasuredCell, config: TuneConfig) -> bool:
    return cell.is_within(max_tpot_ms=config.max_tpot_ms, max_ttft_ms=config.max_ttft_ms)


def _limits_in_words(config: TuneConfig) -> str:
    limits = {
        f"p95 {words} within {limit:g} ms"
        for words, name in _LIMITS.values()
        if (limit := getattr(config, name)) is not None
    }
    return f", {' and '.join(sorted(limits))}" if limits else ""


def _nothing_fits(
    config: TuneConfig, setups: Mapping[str, Setup], search: Search, summaries: Mapping[Candidate, Mapping[str, Any]]
) -> ConfigError:
    ranked = search.ranked()
    if not ranked:
        return ConfigError(
            f"the budget of {config.budget_min:g} engine minutes was spent before any pass finished",
            hint="increase --budget-min; the same command continues",
        )
    nearest, engine = summaries[ranked[0]], setups[ranked[0].engine]
    found = [
        f"p95 {_LIMITS[name][0]} {nearest[name][P95] * 1000:.1f} ms" if nearest[name] else f"no {_LIMITS[name][0]}"
        for name, excess in excesses(nearest, config).items()
        if excess > 0
    ]
    return ConfigError(
        f"no configuration is within the limits{_limits_in_words(config)}; the nearest is {engine.label} with "
        f"{ranked[0].concurrency} at once: {' and '.join(found)}",
        hint="relax the limits, or try fewer concurrent requests with --max-num-seqs, or other hardware; "
        "measurements are reused",
    )


def _notes(setups: Mapping[str, Setup], search: Search) -> list[str]:
    in_part = {candidate.engine for candidate in search.ranked()}
    notes = [
        f"{setups[name].label} could {'only in part' if name in in_part else 'not'} be measured: {why}"
        for name, why in search.failed.items()
    ]
    left = [turn.candidate for turn in search.pending() if not turn.repeat]
    engines = dict.fromkeys(setups[candidate.engine].label for candidate in left)
    if engines:
        notes.append(
            f"Not measured within the budget: {'; '.join(engines)}. Increase --budget-min to continue with them."
        )
    return notes


def _revision(model: ResolvedModel) -> str:
    return model.fingerprint or "unknown"
