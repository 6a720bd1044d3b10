"""What the figures of the quality benchmark add up to; pure."""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from peagle.speculation import SpeculationStats

SIDES = ("float32", "int8")


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of a result as `quality.py` writes it."""
    problems = list(result["problems"].values())
    return {
        "nats_per_token": {kind: _likelihood(result[kind].values()) for kind in ("responses", "problems")},
        "passed": {side: sum(one[side]["passed"] for one in problems) for side in SIDES},
        "passed_with_float32_alone": sum(one["float32"]["passed"] > one["int8"]["passed"] for one in problems),
        "passed_with_int8_alone": sum(one["float32"]["passed"] < one["int8"]["passed"] for one in problems),
        "equal_answers": sum(one["float32"]["answer"] == one["int8"]["answer"] for one in problems),
        "acceptance_length": {
            drafter: {side: _length(one[side]["accepted"][drafter] for one in problems) for side in SIDES}
            for drafter in (problems[0]["int8"]["accepted"] if problems else ())
        },
    }


def _likelihood(texts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The nats of a token on both sides, and how many more INT8 costs.

    `more` is the mean over texts, with its standard error.
    """
    known = list(texts)
    if len(known) < 2:
        return {}
    tokens = sum(text["num_tokens"] for text in known)
    more = [(text["int8"]["nats"] - text["float32"]["nats"]) / text["num_tokens"] for text in known]
    return {side: sum(text[side]["nats"] for text in known) / tokens for side in SIDES} | {
        "num_texts": len(known),
        "num_tokens": tokens,
        "more": fmean(more),
        "standard_error": stdev(more) / sqrt(len(more)),
    }


def _length(histograms: Iterable[Sequence[int]]) -> dict[str, Any]:
    stats = SpeculationStats.empty()
    for histogram in histograms:
        stats += SpeculationStats.from_histogram(histogram, sum(histogram) * (len(histogram) - 1))
    return {
        "length": stats.acceptance_length,
        "num_drafts": stats.num_drafts,
        "accepted_per_position": stats.accepted_per_position,
    }
