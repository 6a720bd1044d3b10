"""One cell in one engine: ask every prompt, so many at a time, and count.

It knows the `Engine` seam and asyncio; it does not know which engine it is, or where results go.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peagle.drafter.evaluation.cell import Cell, CellResult, by_category, difference, merged_speculation
from peagle.drafter.evaluation.dataset import Prompt
from peagle.engine.generation import Engine, Generation, RequestRefused

_WARM_UP_TOKENS = 8
# vLLM hands a response out before it adds its last step to its counters.
_COUNTERS_SETTLE_S = 0.2


async def measure(
    cell: Cell,
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    sampling: Mapping[str, Any],
    concurrency: int,
    start_s: float,
    progress: Callable[[int, int], None],
) -> CellResult:
    """Run all prompts through a fresh engine, and shut it down.

    The first prompt is asked for a few tokens beforehand: what an engine does once is not in its speed.

    Args:
        start_s: what the engine took to start.
        progress: told how many responses are there, of how many.

    Raises:
        EngineError: the engine died, or drafted nothing.
    """
    try:
        warm_up = {**sampling, "max_tokens": min(_WARM_UP_TOKENS, sampling["max_tokens"])}
        with contextlib.suppress(RequestRefused):
            await engine.generate("warm-up", prompts[0].token_ids, warm_up)
        await asyncio.sleep(_COUNTERS_SETTLE_S)
        before = engine.speculation_totals()
        started = time.monotonic()
        generations = await _ask(engine, prompts, sampling, concurrency, progress)
        wall_s = time.monotonic() - started
        await asyncio.sleep(_COUNTERS_SETTLE_S)
        drafted = difference(engine.speculation_totals(), before)
    finally:
        engine.shutdown()
    responses = [generation for generation in generations if generation is not None]
    return CellResult(
        drafter=cell.label,
        method=cell.spec.method,
        fingerprint=cell.fingerprint,
        k=cell.k,
        start_s=start_s,
        wall_s=wall_s,
        num_responses=len(responses),
        num_refused=len(generations) - len(responses),
        num_output_tokens=sum(generation.num_output_tokens for generation in responses),
        speculation=merged_speculation(responses, drafted),
        by_category=by_category(generations, [prompt.category for prompt in prompts]),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


async def _ask(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
) -> list[Generation | None]:
    """A response for each prompt, None where the engine refuses it."""
    slots = asyncio.Semaphore(concurrency)
    num_done = 0

    async def ask(index: int) -> Generation | None:
        nonlocal num_done
        async with slots:
            try:
                return await engine.generate(str(index), prompts[index].token_ids, sampling)
            except RequestRefused:
                return None
            finally:
                num_done += 1
                progress(num_done, len(prompts))

    return list(await asyncio.gather(*map(ask, range(len(prompts)))))
