"""A closed loop: so many prompts in the engine at a time, each prompt once.

The next prompt starts as soon as one is answered.

It knows the `Engine` seam and asyncio; it does not know which engine it is, or what the answers are for.
"""

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
# vLLM hands a response out before it adds its last step to its counters.
_COUNTERS_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response, and how long its asker waited for the whole of it."""

    generation: Generation
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The outcome of one pass over all prompts.

    Attributes:
        answers: by prompt, None where the engine refused it.
        wall_s: from the first request to the last response.
        drafted: drafts that the engine counted meanwhile; None where it counts none.
    """

    answers: Sequence[Answer | None]
    wall_s: float
    drafted: SpeculationStats | None

    @property
    def generations(self) -> list[Generation | None]:
        """The responses by prompt, None where the engine refused it."""
        return [answer.generation if answer else None for answer in self.answers]

    @property
    def responses(self) -> list[Generation]:
        """The responses that there are."""
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
    """Ask every prompt.

    The first prompts are asked for a few tokens beforehand: what an engine does once is not in its speed.

    Args:
        progress: told how many responses are there, of how many.
        num_warm_up: prompts asked beforehand, all at once.

    Raises:
        EngineError: the engine died.
    """
    warm_up = {**sampling, "max_tokens": min(_WARM_UP_TOKENS, sampling["max_tokens"])}
    await asyncio.gather(*(_ask(engine, f"warm-up-{i}", p, warm_up) for i, p in enumerate(prompts[:num_warm_up])))
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    before = engine.speculation_totals()
    started = time.monotonic()
    answers = await _ask_all(engine, prompts, sampling, concurrency, progress)
    wall_s = time.monotonic() - started
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    return Loop(answers=answers, wall_s=wall_s, drafted=difference(engine.speculation_totals(), before))


def difference(after: SpeculationStats | None, before: SpeculationStats | None) -> SpeculationStats | None:
    """The drafts between two readings of an engine's counters.

    None where it keeps none.
    """
    if after is None or before is None:
        return None
    pairs = zip_longest(after.accepted_per_position, before.accepted_per_position, fillvalue=0)
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        accepted_per_position=tuple(a - b for a, b in pairs),
    )


async def _ask_all(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
) -> list[Answer | None]:
    slots = asyncio.Semaphore(concurrency)
    num_done = 0

    async def ask(index: int) -> Answer | None:
        nonlocal num_done
        async with slots:
            try:
                return await _ask(engine, str(index), prompts[index], sampling)
            finally:
                num_done += 1
                progress(num_done, len(prompts))

    return list(await asyncio.gather(*map(ask, range(len(prompts)))))


async def _ask(engine: Engine, request_id: str, prompt: BenchPrompt, sampling: Mapping[str, Any]) -> Answer | None:
    started = time.monotonic()
    with contextlib.suppress(RequestRefused):
        generation = await engine.generate(request_id, prompt.token_ids, sampling)
        return Answer(generation=generation, elapsed_s=time.monotonic() - started)
    return None
