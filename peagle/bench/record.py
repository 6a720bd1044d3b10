"""What is kept of one pass: what each request took, and what was drafted. Data, and how it is made of a closed loop.

It knows nothing of files, or of how passes are put together.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from peagle.bench.schedule import Pass
from peagle.engine.generation import Engine
from peagle.measurement.closed_loop import Answer, Loop
from peagle.speculation import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request, as who asked saw it.

    Attributes:
        elapsed_s: from asking to the whole response.
        decode_s: of that, from the first token to the last, by the engine's clock; None where it cannot say.
    """

    num_output_tokens: int
    elapsed_s: float
    decode_s: float | None

    @property
    def ttft_s(self) -> float | None:
        """From asking to the first token: waiting for a slot and a step included."""
        return None if self.decode_s is None else max(self.elapsed_s - self.decode_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None where there is no other."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        """What this user saw."""
        return self.num_output_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """What was measured in one pass.

    Attributes:
        wall_s: from the first request to the last response; the warm-up before it is not in it.
        start_s: what the engine that ran it took to start, compiling included.
        num_refused: requests that the engine did not take.
        speculation: drafts of all responses; empty where nothing was drafted.
        requests: those that were answered.
        peak_memory_gib: while the pass ran (`peagle.bench.memory`); None where it cannot be read.
        measured_at: UTC, ISO 8601.
        model_runner: of vLLM, "V1" or "V2"; None where it cannot be told, and in records from before it was kept.
        self_check: as `SelfCheck.to_dict` has it; None in records from before there was one.
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

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        """Of the engine, over the time in which requests ran."""
        return self.num_output_tokens / self.wall_s

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data; the inverse of `from_dict`."""
        return asdict(self) | {"speculation": self.speculation.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is not what `to_dict` wrote.
        """
        requests = [RequestTimes(**request) for request in data["requests"]]
        return cls(**{**data, "speculation": SpeculationStats.from_dict(data["speculation"]), "requests": requests})


def make_record(one: Pass, loop: Loop, engine: Engine, *, start_s: float, peak_memory_gib: float | None) -> PassRecord:
    """The record of a pass that just ended in this engine."""
    return PassRecord(
        method=one.setup.method,
        k=one.setup.k,
        concurrency=one.concurrency,
        repeat=one.repeat,
        wall_s=loop.wall_s,
        start_s=start_s,
        num_refused=sum(answer is None for answer in loop.answers),
        speculation=_drafted(loop),
        requests=[_times(answer) for answer in loop.answers if answer],
        peak_memory_gib=peak_memory_gib,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        model_runner=engine.model_runner,
        self_check=None if engine.self_check is None else engine.self_check.to_dict(),
    )


def _drafted(loop: Loop) -> SpeculationStats:
    """By response where the engine says so, else by its own count."""
    known = [response.speculation for response in loop.responses if response.speculation is not None]
    return sum(known, start=SpeculationStats.empty()) if known else loop.drafted or SpeculationStats.empty()


def _times(answer: Answer) -> RequestTimes:
    found = answer.generation
    has_times = found.latency_s is not None and found.ttft_s is not None
    return RequestTimes(
        num_output_tokens=found.num_output_tokens,
        elapsed_s=answer.elapsed_s,
        decode_s=found.latency_s - found.ttft_s if has_times else None,  # type: ignore[operator]  # has_times
    )
