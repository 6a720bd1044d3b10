"""A closed loop: a fixed number of concurrent requests, until every prompt is answered once."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from peagle.bench.prompts import BenchPrompt
from peagle.engine.interface import Engine, Generation, RequestRefused
from peagle.speculation import SpeculationStats

_WARM_UP_TOKENS = 8
# vLLM returns a response before it updates its counters.
_COUNTERS_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    generation: Generation
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The result of one pass over all prompts.

    Attributes:
        answers: by prompt; None if the engine rejected it.
        wall_s: from the first request to the last response.
        drafted: drafts counted by the engine during the pass; None if it does not count drafts.
    """

    answers: Sequence[Answer | None]
    wall_s: float
    drafted: SpeculationStats | None

    @property
    def generations(self) -> list[Generation | None]:
        return [answer.generation if answer else None for answer in self.answers]

    @property
    def responses(self) -> list[Generation]:
        return [answer.generation for answer in self.answers if answer]


async def run_loop(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
    num_warm_up: int,
) -> Loop:
    """Send every prompt once, after a short warm-up that is not measured.

    Args:
        progress: called with the number of finished and of all requests.
        num_warm_up: number of concurrent warm-up requests.
    """
    warm_up = {**sampling, "max_tokens": min(_WARM_UP_TOKENS, sampling["max_tokens"])}
    await asyncio.gather(*(_send(engine, f"warm-up-{i}", p, warm_up) for i, p in enumerate(prompts[:num_warm_up])))
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    before = engine.speculation_totals()
    started = time.monotonic()
    answers = await _send_all(engine, prompts, sampling, concurrency, progress)
    wall_s = time.monotonic() - started
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    return Loop(answers=answers, wall_s=wall_s, drafted=difference(engine.speculation_totals(), before))


def difference(after: SpeculationStats | None, before: SpeculationStats | None) -> SpeculationStats | None:
    """Return the drafts between two readings of an engine's counters; None if it does not count drafts."""
    if after is None or before is None:
        return None
    pairs = zip_longest(after.accepted_per_position, before.accepted_per_position, fillvalue=0)
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        accepted_per_position=tuple(a - b for a, b in pairs),
    )


async def _send_all(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
) -> list[Answer | None]:
    slots = asyncio.Semaphore(concurrency)
    num_done = 0

    async def send(index: int) -> Answer | None:
        nonlocal num_done
        async with slots:
            try:
                return await _send(engine, str(index), prompts[index], sampling)
            finally:
                num_done += 1
                progress(num_done, len(prompts))

    return list(await asyncio.gather(*map(send, range(len(prompts)))))


async def _send(engine: Engine, request_id: str, prompt: BenchPrompt, sampling: Mapping[str, Any]) -> Answer | None:
    started = time.monotonic()
    with contextlib.suppress(RequestRefused):
        generation = await engine.generate(request_id, prompt.token_ids, sampling)
        return Answer(generation=generation, elapsed_s=time.monotonic() - started)
    return None
