"""Summarize the figures of the quality benchmark."""

from collections.abc import Mapping
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from peagle.speculation import SpeculationStats


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a result of `quality.py`.

    With two precisions, the summary has differences: the second precision minus the first.
    """
    engines = result["engines"]
    without_drafter = {precision: drafters["none"] for precision, drafters in engines.items() if "none" in drafters}
    summary: dict[str, Any] = {
        "nats_per_token": {
            kind: _likelihood(without_drafter, kind, counts) for kind, counts in result["num_tokens"].items()
        },
        "passed": {precision: sum(measured["passed"].values()) for precision, measured in without_drafter.items()},
        "acceptance": {
            precision: {
                drafter: _acceptance(measured["drafts"]) for drafter, measured in drafters.items() if drafter != "none"
            }
            for precision, drafters in engines.items()
        },
    }
    if len(without_drafter) == 2:
        (first, before), (second, after) = without_drafter.items()
        pairs = [(passed, after["passed"][name]) for name, passed in before["passed"].items()]
        summary |= {
            f"passed_with_{first}_alone": pairs.count((True, False)),
            f"passed_with_{second}_alone": pairs.count((False, True)),
            "equal_answers": sum(answer == after["answers"][name] for name, answer in before["answers"].items()),
        }
    return summary


def _likelihood(
    by_precision: Mapping[str, Mapping[str, Any]], kind: str, num_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return the negative log-likelihood per token at each precision, in nats, and the increase with the second one.

    The increase (`more`) is the mean over texts, with its standard error.
    """
    total_tokens = sum(num_tokens.values())
    summary: dict[str, Any] = {"num_texts": len(num_tokens), "num_tokens": total_tokens}
    summary |= {precision: sum(measured[kind].values()) / total_tokens for precision, measured in by_precision.items()}
    if len(by_precision) == 2 and len(num_tokens) > 1:
        before, after = (measured[kind] for measured in by_precision.values())
        increases = [(after[name] - before[name]) / number for name, number in num_tokens.items()]
        summary |= {"more": fmean(increases), "standard_error": stdev(increases) / sqrt(len(increases))}
    return summary


def _acceptance(drafts: Mapping[str, Any]) -> dict[str, Any]:
    stats = SpeculationStats.from_dict(drafts)
    return {"length": stats.acceptance_length, "rates": [round(rate, 4) for rate in stats.acceptance_rates]}
