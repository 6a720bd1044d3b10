"""The report of a benchmark as JSON-ready data, from which all tables and plots are made."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.folder import SCHEMA
from peagle.bench.plan import MODEL_RUNNER, BenchPlan, Pass, chosen_model_runner
from peagle.bench.prompts import Dataset
from peagle.bench.record import PassRecord, acceptance, sources, summarise
from peagle.bench.setups import Setup
from peagle.engine.steps import max_num_batched_tokens
from peagle.errors import ConfigError
from peagle.profiles.measurements import METHOD_NAMES, NONE
from peagle.provenance import git_revision, versions

_ENOUGH = 3  # requests per slot; with fewer, much of a pass runs below its concurrency


def require_prompts(config: BenchConfig, num_prompts: int) -> None:
    largest = max(config.concurrency)
    if config.requests_per_slot is None and num_prompts < largest:
        raise ConfigError(
            f"concurrency {largest} cannot be reached with {num_prompts} prompts",
            hint=f"repeat prompts with --requests-per-slot {_ENOUGH + 1}, use more prompts, or decrease --concurrency",
        )


def few_prompts(config: BenchConfig, num_prompts: int) -> list[str]:
    """Return a warning if passes are too short for their concurrency."""
    few = [c for c in config.concurrency if (config.requests_per_slot or num_prompts / c) < _ENOUGH]
    if not few:
        return []
    return [
        f"Fewer than {_ENOUGH} requests per slot at concurrency {', '.join(map(str, few))}: much of a pass runs"
        " below its "
        "concurrency, so tokens/s are too low. Use more prompts or --requests-per-slot."
    ]


def model_runners(config: BenchConfig, platform: str, chosen: str | None, records: Sequence[PassRecord]) -> list[str]:
    """Return a warning if methods used, or may use, different model runners of vLLM.

    Args:
        chosen: the user's setting of `VLLM_USE_V2_MODEL_RUNNER`.
        records: records of finished passes.
    """
    methods: dict[str, list[str]] = {}
    for record in records:
        if record.model_runner is not None:
            methods.setdefault(record.model_runner, []).append(METHOD_NAMES[record.method])
    if len(methods) > 1:
        runners = "; ".join(f"{runner} ran {', '.join(dict.fromkeys(methods[runner]))}" for runner in sorted(methods))
        return [
            f"vLLM used different model runners: {runners}. Their difference affects the ratios. "
            f"Set {MODEL_RUNNER}=0 and another --output to run all methods on V1."
        ]
    is_known = bool(records) and all(record.model_runner is not None for record in records)
    if platform == "cuda" and chosen is None and len(config.methods) > 1 and not is_known:
        return [
            f"{MODEL_RUNNER} is not set, and on a GPU vLLM may use another model runner for P-EAGLE than for other "
            f"methods. Set {MODEL_RUNNER}=0 to run all of them on V1."
        ]
    return []


SYNTHETIC = (
    "SYNTHETIC ACCEPTANCE: drafts are accepted at random and the text is meaningless; these figures only time hardware"
)
DUMMY = "DUMMY WEIGHTS: the weights are random and the text is meaningless; these figures only time hardware"


def make_report(
    plan: BenchPlan, dataset: Dataset, done: Mapping[Pass, PassRecord], failed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the report of all finished passes.

    Args:
        failed: error messages of failed engines, by label.
    """
    cells = _cells(plan, done)
    num_left = len(plan.passes) - len(done)
    warnings = [
        *caveats(plan, dataset, list(done.values())),
        *(f"Not complete: {label}, because its engine failed: {message}" for label, message in failed.items()),
        *([f"Not finished: {num_left} passes remain."] if num_left else []),
    ]
    return {
        "schema": SCHEMA,
        "labels": labels(plan),
        "model": plan.model.name,
        "configuration": plan.config.model_dump(mode="json"),
        "engine": plan.spec.to_dict(),
        "fingerprint": plan.fingerprint(dataset),
        "hardware": plan.hardware.to_dict() | {"description": plan.hardware.describe()},
        "versions": versions() | {"python": platform.python_version(), "git_revision": git_revision()},
        "precision": plan.precision.describe(),
        "compiled": not plan.spec.enforce_eager,
        "sampling": plan.config.sampling(),
        "dataset": {"name": dataset.name, "num_prompts": len(dataset.prompts), "rejected": dataset.rejected},
        "price": plan.price.to_dict() if plan.price else None,
        "usd_per_s": plan.usd_per_s,
        "setups": [_setup(plan, setup, done) for setup in plan.setups],
        "cells": cells,
        "ratios": ratios(cells),
        "num_passes_left": num_left,
        "failed": dict(failed),
        "caveats": warnings,
        "notes": [*plan.notes, *sources((one.setup.label, record) for one, record in done.items()), *warnings],
    }


def labels(plan: BenchPlan) -> list[str]:
    """Return the labels for figures without real text."""
    is_dummy = plan.config.load_format == "dummy"
    return ([SYNTHETIC] if plan.config.synthetic_acceptance else []) + ([DUMMY] if is_dummy else [])


def caveats(plan: BenchPlan, dataset: Dataset, records: Sequence[PassRecord]) -> list[str]:
    config, platform = plan.config, plan.hardware.platform
    return [
        *few_prompts(config, len(dataset.prompts)),
        *model_runners(config, platform, chosen_model_runner(), records),
    ]


def best(cells: Sequence[Mapping[str, Any]], method: str, concurrency: int) -> Mapping[str, Any] | None:
    """Return the cell of a method with the highest speed at a concurrency; None if it was not measured."""
    candidates = [cell for cell in cells if (cell["method"], cell["concurrency"]) == (method, concurrency)]
    return max(candidates, key=lambda cell: cell["output_tokens_per_s"], default=None)


def ratios(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return speed ratios by concurrency: P-EAGLE over EAGLE-3, and each method over none, at the best K.

    `range_by_concurrency` is the range over the repeats, with the same K.
    """
    results = []
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    for over in ("eagle3", NONE):
        for method in methods:
            if method in (NONE, over) or over not in methods or (over == "eagle3" and method != "peagle"):
                continue
            bests = {str(c): (best(cells, method, c), best(cells, over, c)) for c in _concurrencies(cells)}
            results.append(
                {
                    "method": method,
                    "over": over,
                    "by_concurrency": {c: _ratio(*both) for c, both in bests.items()},
                    "range_by_concurrency": {c: _ratio_range(*both) for c, both in bests.items()},
                }
            )
    return results


def _ratio(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> float | None:
    if ours is None or theirs is None or not theirs["output_tokens_per_s"]:
        return None
    return float(ours["output_tokens_per_s"] / theirs["output_tokens_per_s"])


def _ratio_range(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> list[float] | None:
    """Return the range over the repeats that both have; None for fewer than two."""
    if ours is None or theirs is None:
        return None
    our_speeds, their_speeds = _by_repeat(ours), _by_repeat(theirs)
    shared = our_speeds.keys() & their_speeds.keys()
    values = [our_speeds[repeat] / their_speeds[repeat] for repeat in shared if their_speeds[repeat]]
    return [min(values), max(values)] if len(values) > 1 else None


def _by_repeat(cell: Mapping[str, Any]) -> dict[int, float]:
    return dict(zip(cell["repeat_numbers"], cell["output_tokens_per_s_by_repeat"], strict=True))


def _concurrencies(cells: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({cell["concurrency"] for cell in cells})


def _cells(plan: BenchPlan, done: Mapping[Pass, PassRecord]) -> list[dict[str, Any]]:
    cells = []
    for setup in plan.setups:
        for concurrency in plan.config.concurrency:
            own = [record for one, record in done.items() if (one.setup, one.concurrency) == (setup, concurrency)]
            if own:
                cells.append(summarise(own, usd_per_s=plan.usd_per_s))
    return cells


def _setup(plan: BenchPlan, setup: Setup, done: Mapping[Pass, PassRecord]) -> dict[str, Any]:
    """Describe a setup, with its acceptance over all concurrencies."""
    spec = setup.spec
    own = [record for one, record in done.items() if one.setup == setup]
    rates = setup.drafter.synthetic_rates if setup.drafter else None
    return {
        "method": setup.method,
        "k": setup.k,
        "label": setup.label,
        "head": setup.head,
        "head_fingerprint": setup.fingerprint or None,
        "max_num_batched_tokens": spec.max_num_batched_tokens or max_num_batched_tokens(spec, plan.hardware),
        "synthetic_rates": list(rates) if rates is not None else None,
        "model_runner": next((record.model_runner for record in own if record.model_runner), None),
        **acceptance([record.speculation for record in own]),
    }
