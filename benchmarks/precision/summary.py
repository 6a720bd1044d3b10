"""What the figures of the quality benchmark add up to; pure."""

from collections.abc import Mapping
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from peagle.speculation import SpeculationStats


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of a result as `quality.py` writes it.

    Differences are those of its second precision from its first, over what both have.
    """
    engines = result["engines"]
    alone = {precision: of["none"] for precision, of in engines.items() if "none" in of}
    summary: dict[str, Any] = {
        "nats_per_token": {kind: _likelihood(alone, kind, counts) for kind, counts in result["num_tokens"].items()},
        "passed": {precision: sum(found["passed"].values()) for precision, found in alone.items()},
        "acceptance": {
            precision: {drafter: _acceptance(found["drafts"]) for drafter, found in of.items() if drafter != "none"}
            for precision, of in engines.items()
        },
    }
    if len(alone) == 2:
        (first, before), (second, after) = alone.items()
        pairs = [(passed, after["passed"][name]) for name, passed in before["passed"].items()]
        summary |= {
            f"passed_with_{first}_alone": pairs.count((True, False)),
            f"passed_with_{second}_alone": pairs.count((False, True)),
            "equal_answers": sum(answer == after["answers"][name] for name, answer in before["answers"].items()),
        }
    return summary


def _likelihood(alone: Mapping[str, Mapping[str, Any]], kind: str, num_tokens: Mapping[str, int]) -> dict[str, Any]:
    """The nats of a token at each precision, and how many more the second one costs.

    `more` is the mean over texts, with its standard error.
    """
    tokens = sum(num_tokens.values())
    found: dict[str, Any] = {"num_texts": len(num_tokens), "num_tokens": tokens}
    found |= {precision: sum(of[kind].values()) / tokens for precision, of in alone.items()}
    if len(alone) == 2 and len(num_tokens) > 1:
        before, after = (of[kind] for of in alone.values())
        more = [(after[name] - before[name]) / number for name, number in num_tokens.items()]
        found |= {"more": fmean(more), "standard_error": stdev(more) / sqrt(len(more))}
    return found


def _acceptance(drafts: Mapping[str, Any]) -> dict[str, Any]:
    stats = SpeculationStats.from_dict(drafts)
    return {"length": stats.acceptance_length, "rates": [round(rate, 4) for rate in stats.acceptance_rates]}
