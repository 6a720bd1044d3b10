"""A benchmark's results as JSON-ready data; every table and plot is made from it alone.

It knows nothing of engines or files.
"""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.caveats import few_prompts, model_runners
from peagle.bench.config import NONE
from peagle.bench.plan import Plan
from peagle.bench.record import PassRecord
from peagle.bench.summary import acceptance, summarise
from peagle.engine.arguments import max_num_batched_tokens
from peagle.manifest import git_revision, versions
from peagle.measurement.dataset import Dataset
from peagle.measurement.target import chosen_model_runner

SCHEMA = 1
SYNTHETIC = "SYNTHETIC ACCEPTANCE: drafts are accepted by lot and the text means nothing; these figures time hardware"
DUMMY = "DUMMY WEIGHTS: the weights are random and the text means nothing; these figures time hardware"


def make_report(
    plan: Plan, dataset: Dataset, records: Sequence[PassRecord], failed: Mapping[str, str]
) -> dict[str, Any]:
    """All that was measured so far and what it was measured on.

    Args:
        failed: engines that did not start or died in this command, by their labels: what was said of each.
    """
    cells = _cells(plan, records)
    num_left = len(plan.passes) - len(records)
    of_figures = [
        *caveats(plan, dataset, records),
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
        "setups": [_setup(plan, index, records) for index in range(len(plan.setups))],
        "cells": cells,
        "ratios": ratios(cells),
        "num_passes_left": num_left,
        "failed": dict(failed),
        "caveats": of_figures,
        "notes": [*plan.notes, *of_figures],
    }


def labels(plan: Plan) -> list[str]:
    """What must stand over every figure; nothing where they are of real text."""
    is_dummy = plan.config.load_format == "dummy"
    return ([SYNTHETIC] if plan.config.synthetic_acceptance else []) + ([DUMMY] if is_dummy else [])


def caveats(plan: Plan, dataset: Dataset, records: Sequence[PassRecord]) -> list[str]:
    """What makes figures worth less than they look, as far as they are there."""
    config, platform = plan.config, plan.hardware.platform
    return [
        *few_prompts(config, len(dataset.prompts)),
        *model_runners(config, platform, chosen_model_runner(), records),
    ]


def best(cells: Sequence[Mapping[str, Any]], method: str, concurrency: int) -> Mapping[str, Any] | None:
    """The K of a method with the most output tokens a second at a concurrency; None where it was not measured."""
    among = [cell for cell in cells if (cell["method"], cell["concurrency"]) == (method, concurrency)]
    return max(among, key=lambda cell: cell["output_tokens_per_s"], default=None)


def ratios(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By concurrency, the best K of P-EAGLE over that of EAGLE-3, and of each method over no speculation.

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


def _cells(plan: Plan, records: Sequence[PassRecord]) -> list[dict[str, Any]]:
    """Setup by setup, concurrencies ascending."""
    found = []
    for setup in plan.setups:
        for concurrency in plan.config.concurrency:
            own = [r for r in records if (r.method, r.k, r.concurrency) == (setup.method, setup.k, concurrency)]
            if own:
                found.append(summarise(own, usd_per_s=plan.usd_per_s))
    return found


def _setup(plan: Plan, index: int, records: Sequence[PassRecord]) -> dict[str, Any]:
    """A setup, and its acceptance over all concurrencies: it is the same drafter on the same prompts."""
    setup = plan.setups[index]
    spec = plan.engine_spec(setup)
    own = [record for record in records if (record.method, record.k) == (setup.method, setup.k)]
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
