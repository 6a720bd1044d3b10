"""From the summary of an arm's passes to its score: the objective, and by how much a limit is exceeded. Pure."""

from collections.abc import Mapping
from typing import Any

from peagle.tuning.config import TuneConfig
from peagle.tuning.halving import Score

P95 = "p95"


def score(summary: Mapping[str, Any], config: TuneConfig) -> Score:
    """The score of one summary (`peagle.bench.summary.summarise`).

    A limit that cannot be checked, since the engine states no times, counts as exceeded by all of it.
    """
    value = summary["output_tokens_per_s"]
    if config.objective == "tokens-per-dollar":
        value = summary["tokens_per_usd"]
        assert value is not None, "make_space() wants a price for this objective"
    return Score(value=value, excess=max(0.0, *excesses(summary, config).values(), 0.0))


def excesses(summary: Mapping[str, Any], config: TuneConfig) -> dict[str, float]:
    """By limit, the share by which it is exceeded; negative within. Empty where no limit was set."""
    limits = {"tpot_s": config.max_tpot_ms, "ttft_s": config.max_ttft_ms}
    return {
        name: (summary[name][P95] * 1000 / limit_ms - 1 if summary[name] else 1.0)
        for name, limit_ms in limits.items()
        if limit_ms is not None
    }
