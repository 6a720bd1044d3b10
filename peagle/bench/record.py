"""The record of one pass, and the summary of a cell's passes.

Speeds are medians over passes. Latencies and acceptance are computed over all requests of all passes.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from peagle.bench.engine import PassResult
from peagle.bench.plan import Pass
from peagle.bench.prompts import BenchPrompt
from peagle.engine.interface import Engine, Generation
from peagle.speculation import SpeculationStats, num_decoding_steps, sources_note

UNCATEGORISED = "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """The times of a request, as seen by the client.

    Attributes:
        elapsed_s: seconds from the request to the complete response.
        decode_s: seconds from the first token to the last, by the engine's clock; None if unknown.
    """

    num_output_tokens: int
    elapsed_s: float
    decode_s: float | None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, including waiting for a slot; None if unknown."""
        return None if self.decode_s is None else max(self.elapsed_s - self.decode_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there is only one token or the time is unknown."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryResult:
    num_responses: int
    num_output_tokens: int
    speculation: SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """The measurements of one pass.

    Attributes:
        wall_s: seconds from the first request to the last response, without the warm-up.
        start_s: seconds to start the engine, including compilation.
        speculation: drafts of all responses; empty without drafts.
        peak_memory_gib: peak memory during the pass (`peagle.bench.engine`); None if unknown.
        model_runner: vLLM's model runner, "V1" or "V2"; None if unknown, and in old records.
        self_check: result of `SelfCheck.to_dict`; None without a self-check, and in old records.
        by_category: results by category; empty if the data has no categories, or the engine does not count drafts per
            request.
    """

    method: str
    k: int
    concurrency: int
    repeat: int
    wall_s: float
    start_s: float
    num_refused: int
    speculation: SpeculationStats
    requests: Sequence[RequestTimes]
    peak_memory_gib: float | None
    measured_at: str
    model_runner: str | None = None
    self_check: Mapping[str, Any] | None = None
    by_category: Mapping[str, CategoryResult] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    def to_dict(self) -> dict[str, Any]:
        categories = {
            name: asdict(category) | {"speculation": category.speculation.to_dict()}
            for name, category in self.by_category.items()
        }
        data = asdict(self) | {"speculation": self.speculation.to_dict(), "by_category": categories}
        return {name: value for name, value in data.items() if name != "by_category" or value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        requests = [RequestTimes(**request) for request in data["requests"]]
        categories = {
            name: CategoryResult(**{**category, "speculation": SpeculationStats.from_dict(category["speculation"])})
            for name, category in data.get("by_category", {}).items()
        }
        speculation = SpeculationStats.from_dict(data["speculation"])
        return cls(**{**data, "speculation": speculation, "requests": requests, "by_category": categories})


def make_record(
    planned: Pass,
    prompts: Sequence[BenchPrompt],
    result: PassResult,
    engine: Engine,
    *,
    start_s: float,
    peak_memory_gib: float | None,
) -> PassRecord:
    requests = []
    for answer in filter(None, result.answers):
        generation, decode_s = answer.generation, None
        if generation.latency_s is not None and generation.ttft_s is not None:
            decode_s = generation.latency_s - generation.ttft_s
        requests.append(
            RequestTimes(num_output_tokens=generation.num_output_tokens, elapsed_s=answer.elapsed_s, decode_s=decode_s)
        )
    # An engine that does not report drafts per response has totals in `result.drafted`.
    drafts = [generation.speculation for generation in result.completed if generation.speculation is not None]
    total_drafts = result.drafted or SpeculationStats.empty()
    return PassRecord(
        method=planned.setup.method,
        k=planned.setup.k,
        concurrency=planned.concurrency,
        repeat=planned.repeat,
        wall_s=result.wall_s,
        start_s=start_s,
        num_refused=sum(answer is None for answer in result.answers),
        speculation=sum(drafts, start=SpeculationStats.empty()) if drafts else total_drafts,
        requests=requests,
        peak_memory_gib=peak_memory_gib,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        model_runner=engine.model_runner,
        self_check=None if engine.self_check is None else engine.self_check.to_dict(),
        by_category=by_category(result.generations, [prompt.category for prompt in prompts]),
    )


def by_category(
    generations: Sequence[Generation | None], categories: Sequence[str | None]
) -> dict[str, CategoryResult]:
    """Group responses by category, in alphabetical order.

    Empty if no row has a category, or the engine does not count drafts per request.
    """
    pairs = [(g, c) for g, c in zip(generations, categories, strict=True) if g is not None]
    if all(category is None for _, category in pairs) or all(g.speculation is None for g, _ in pairs):
        return {}
    groups: dict[str, list[Generation]] = {}
    for generation, category in pairs:
        groups.setdefault(UNCATEGORISED if category is None else category, []).append(generation)
    return {
        name: CategoryResult(
            num_responses=len(group),
            num_output_tokens=sum(g.num_output_tokens for g in group),
            speculation=sum((g.speculation for g in group if g.speculation), start=SpeculationStats.empty()),
        )
        for name, group in sorted(groups.items())
    }


def spread(values: Sequence[float]) -> float:
    """Return the values' range divided by their median."""
    return (max(values) - min(values)) / statistics.median(values)


def summarise(records: Sequence[PassRecord], *, usd_per_s: float | None) -> dict[str, Any]:
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
        "step_s": mean_step_s(records),
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
    merged = sum(stats, start=SpeculationStats.empty())
    return {
        **merged.to_dict(),
        "acceptance_length": merged.acceptance_length,
        "acceptance_rates": list(merged.acceptance_rates),
    }


def source_notes(labelled_records: Iterable[tuple[str, PassRecord]]) -> list[str]:
    """Return notes on accepted drafts by source, for labels with drafts of prompt lookup."""
    stats_by_label: dict[str, SpeculationStats] = {}
    for label, record in labelled_records:
        stats_by_label[label] = stats_by_label.get(label, SpeculationStats.empty()) + record.speculation
    return [f"{label}: {note}" for label, stats in stats_by_label.items() if (note := sources_note(stats))]


def mean_step_s(records: Sequence[PassRecord]) -> float | None:
    """Return the mean seconds per decoding step of a request, including drafting and verification.

    None if the engine does not report times, or there were no steps.
    """
    requests = [request for record in records for request in record.requests]
    if any(request.decode_s is None for request in requests):
        return None
    num_steps = 0
    for record in records:
        drafts = record.speculation
        num_later_tokens = sum(max(request.num_output_tokens - 1, 0) for request in record.requests)
        num_steps += num_decoding_steps(num_later_tokens, drafts.num_drafts, drafts.num_accepted_tokens)
    return sum(request.decode_s or 0.0 for request in requests) / num_steps if num_steps > 0 else None


def _percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    return {f"p{percent}": float(np.percentile(known_values, percent)) for percent in (50, 95, 99)}
