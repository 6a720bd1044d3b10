"""The results of a benchmark as JSON-ready data, with their caveats.

Every table and plot is made from it alone.

It knows nothing of engines or files.
"""

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

_ENOUGH = 3  # requests of a pass for each at once: of fewer, the last ones run with fewer beside them for long


def require_prompts(config: BenchConfig, num_prompts: int) -> None:
    """Refuse a concurrency that no pass would reach.

    Raises:
        ConfigError: it names that concurrency.
    """
    largest = max(config.concurrency)
    if config.requests_per_slot is None and num_prompts < largest:
        raise ConfigError(
            f"concurrency {largest}: there are {num_prompts} prompts, so no more would ever be in the engine at once",
            hint=f"ask them round and round with --requests-per-slot {_ENOUGH + 1}, take more of them, or leave it out",
        )


def few_prompts(config: BenchConfig, num_prompts: int) -> list[str]:
    """That passes are too short for their concurrency; nothing where they are not."""
    few = [c for c in config.concurrency if (config.requests_per_slot or num_prompts / c) < _ENOUGH]
    if not few:
        return []
    return [
        f"Fewer than {_ENOUGH} requests for each at once at concurrency {', '.join(map(str, few))}: for much of a pass "
        "fewer are under way, and its tokens/s are too low. More prompts or --requests-per-slot help."
    ]


def model_runners(config: BenchConfig, platform: str, chosen: str | None, records: Sequence[PassRecord]) -> list[str]:
    """A note that methods used, or may use, different model runners of vLLM.

    None where they did not.

    Args:
        platform: of the hardware.
        chosen: what the user set `VLLM_USE_V2_MODEL_RUNNER` to.
        records: of the passes that are done.
    """
    methods: dict[str, list[str]] = {}
    for record in records:
        if record.model_runner is not None:
            methods.setdefault(record.model_runner, []).append(METHOD_NAMES[record.method])
    if len(methods) > 1:
        found = "; ".join(f"{runner} ran {', '.join(dict.fromkeys(methods[runner]))}" for runner in sorted(methods))
        return [
            f"vLLM took different model runners: {found}. What they differ by is in the ratios, too. "
            f"{MODEL_RUNNER}=0 has all methods run on V1, in a folder of its own."
        ]
    is_known = bool(records) and all(record.model_runner is not None for record in records)
    if platform == "cuda" and chosen is None and len(config.methods) > 1 and not is_known:
        return [
            f"{MODEL_RUNNER} is not set, and on a GPU vLLM may take another model runner for P-EAGLE than for other "
            f"methods. {MODEL_RUNNER}=0 has all of them run on V1."
        ]
    return []


SYNTHETIC = "SYNTHETIC ACCEPTANCE: drafts are accepted by lot and the text means nothing; these figures time hardware"
DUMMY = "DUMMY WEIGHTS: the weights are random and the text means nothing; these figures time hardware"


def make_report(
    plan: BenchPlan, dataset: Dataset, done: Mapping[Pass, PassRecord], failed: Mapping[str, str]
) -> dict[str, Any]:
    """All that was measured so far and what it was measured on.

    Args:
        failed: engines that did not start or died in this command, by their labels: what was said of each.
    """
    cells = _cells(plan, done)
    num_left = len(plan.passes) - len(done)
    of_figures = [
        *caveats(plan, dataset, list(done.values())),
        *(f"Not complete: {label}, whose engine failed: {message}" for label, message in failed.items()),
        *([f"Not finished: {num_left} passes are left."] if num_left else []),
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
        "caveats": of_figures,
        "notes": [*plan.notes, *sources((one.setup.label, record) for one, record in done.items()), *of_figures],
    }


def labels(plan: BenchPlan) -> list[str]:
    """The label over every figure; None where the figures are of real text."""
    is_dummy = plan.config.load_format == "dummy"
    return ([SYNTHETIC] if plan.config.synthetic_acceptance else []) + ([DUMMY] if is_dummy else [])


def caveats(plan: BenchPlan, dataset: Dataset, records: Sequence[PassRecord]) -> list[str]:
    """The reasons why figures are worth less than they look."""
    config, platform = plan.config, plan.hardware.platform
    return [
        *few_prompts(config, len(dataset.prompts)),
        *model_runners(config, platform, chosen_model_runner(), records),
    ]


def best(cells: Sequence[Mapping[str, Any]], method: str, concurrency: int) -> Mapping[str, Any] | None:
    """The K of a method with the most output tokens a second at a concurrency.

    None where it was not measured.
    """
    among = [cell for cell in cells if (cell["method"], cell["concurrency"]) == (method, concurrency)]
    return max(among, key=lambda cell: cell["output_tokens_per_s"], default=None)


def ratios(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ratios by concurrency: best K of P-EAGLE to EAGLE-3, and each method to none.

    `range_by_concurrency` has the least and the most of it in a repeat, with each method's best K held.
    """
    found = []
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    for over in ("eagle3", NONE):
        for method in methods:
            if method in (NONE, over) or over not in methods or (over == "eagle3" and method != "peagle"):
                continue
            bests = {str(c): (best(cells, method, c), best(cells, over, c)) for c in _concurrencies(cells)}
            found.append(
                {
                    "method": method,
                    "over": over,
                    "by_concurrency": {c: _ratio(*both) for c, both in bests.items()},
                    "range_by_concurrency": {c: _ratio_range(*both) for c, both in bests.items()},
                }
            )
    return found


def _ratio(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> float | None:
    if ours is None or theirs is None or not theirs["output_tokens_per_s"]:
        return None
    return float(ours["output_tokens_per_s"] / theirs["output_tokens_per_s"])


def _ratio_range(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> list[float] | None:
    """The least and the most of a repeat that both have; None where they have no two."""
    if ours is None or theirs is None:
        return None
    our_speeds, their_speeds = _by_repeat(ours), _by_repeat(theirs)
    found = [our_speeds[r] / their_speeds[r] for r in our_speeds.keys() & their_speeds.keys() if their_speeds[r]]
    return [min(found), max(found)] if len(found) > 1 else None


def _by_repeat(cell: Mapping[str, Any]) -> dict[int, float]:
    return dict(zip(cell["repeat_numbers"], cell["output_tokens_per_s_by_repeat"], strict=True))


def _concurrencies(cells: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({cell["concurrency"] for cell in cells})


def _cells(plan: BenchPlan, done: Mapping[Pass, PassRecord]) -> list[dict[str, Any]]:
    """Setup by setup, concurrencies ascending."""
    found = []
    for setup in plan.setups:
        for concurrency in plan.config.concurrency:
            own = [record for one, record in done.items() if (one.setup, one.concurrency) == (setup, concurrency)]
            if own:
                found.append(summarise(own, usd_per_s=plan.usd_per_s))
    return found


def _setup(plan: BenchPlan, setup: Setup, done: Mapping[Pass, PassRecord]) -> dict[str, Any]:
    """A setup and its acceptance over all concurrencies.

    It is the same drafter on the same prompts.
    """
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
