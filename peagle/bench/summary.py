"""The passes of a cell put together: medians, spread, percentiles, acceptance, price. Pure arithmetic.

Speeds are taken by pass and their median is shown; the spread is the range of the passes over that median. Latencies
and acceptance are of all requests of all passes.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from peagle.bench.record import PassRecord
from peagle.engine.spec import DRAFT_METHODS
from peagle.speculation import SpeculationStats

PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values in proportion, as numpy does it.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([1.0, 2.0], 95)
    (2.5, 1.95)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> float:
    """The range over the median.

    >>> spread([9.0, 10.0, 12.0])
    0.3
    """
    return (max(values) - min(values)) / statistics.median(values)


def summarise(records: Sequence[PassRecord], *, usd_per_s: float | None) -> dict[str, Any]:
    """One cell: all passes of one setup at one concurrency, as JSON-ready data.

    Args:
        usd_per_s: of the devices that the engine holds; None where no price is known.
    """
    first, requests = records[0], [request for record in records for request in record.requests]
    speeds = [record.output_tokens_per_s for record in records]
    memory = [record.peak_memory_gib for record in records if record.peak_memory_gib is not None]
    tokens_per_s = statistics.median(speeds)
    return {
        "method": first.method,
        "k": first.k,
        "concurrency": first.concurrency,
        "repeats": len(records),
        "output_tokens_per_s": tokens_per_s,
        "spread": spread(speeds) if tokens_per_s and len(speeds) > 1 else None,
        "output_tokens_per_s_by_repeat": speeds,
        "repeat_numbers": [record.repeat for record in records],
        "user_tokens_per_s": statistics.median(r.tokens_per_s for r in requests) if requests else None,
        "ttft_s": _percentiles([r.ttft_s for r in requests]),
        "tpot_s": _percentiles([r.tpot_s for r in requests]),
        "step_s": step_s(records),
        **acceptance([record.speculation for record in records]),
        "tokens_per_usd": tokens_per_s / usd_per_s if usd_per_s else None,
        "peak_memory_gib": max(memory, default=None),
        "start_s": statistics.median(record.start_s for record in records),
        "num_responses": len(requests),
        "num_refused": sum(record.num_refused for record in records),
        "num_output_tokens": sum(record.num_output_tokens for record in records),
        "measured_at": [record.measured_at for record in records],
    }


def acceptance(stats: Sequence[SpeculationStats]) -> dict[str, Any]:
    """Drafts and their acceptance, of everything given."""
    merged = sum(stats, start=SpeculationStats.empty())
    return {
        **merged.to_dict(),
        "acceptance_length": merged.acceptance_length,
        "acceptance_rates": list(merged.acceptance_rates),
    }


def step_s(records: Sequence[PassRecord]) -> float | None:
    """Mean seconds of a decoding step of a request: one pass of the target, drafting and verifying included.

    None where the engine states no times, or there was no step.
    """
    requests = [request for record in records for request in record.requests]
    if any(request.decode_s is None for request in requests):
        return None
    num_steps = sum(map(_num_steps, records))
    return sum(request.decode_s or 0.0 for request in requests) / num_steps if num_steps > 0 else None


def _num_steps(record: PassRecord) -> int:
    """Steps after the first token of each response.

    With a head each of them verifies a draft. Without one a step may have no draft: it yields one token of the target's
    own and the drafts that it accepts, so the tokens after the first are the steps and the accepted drafts. (That is
    a little low with drafts: those accepted beyond the end of a response count, too.)
    """
    if record.method in DRAFT_METHODS:
        return record.speculation.num_drafts
    num_later_tokens = sum(max(request.num_output_tokens - 1, 0) for request in record.requests)
    return num_later_tokens - record.speculation.num_accepted_tokens


def _percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {f"p{percent}": percentile(known, percent) for percent in PERCENTILES} if known else None
