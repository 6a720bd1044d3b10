"""One cell in one engine: ask every prompt, so many at a time, and count.

It knows the `Engine` seam; it does not know which engine it is, or where results go.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peagle.drafter.evaluation.cell import Cell, CellResult, by_category, merged_speculation
from peagle.engine.generation import Engine
from peagle.measurement.closed_loop import run_loop
from peagle.measurement.dataset import Prompt


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
    """Run all prompts through a fresh engine.

    Args:
        start_s: what the engine took to start.
        progress: told how many responses are there, of how many.

    Raises:
        EngineError: the engine died, or drafted nothing.
    """
    loop = await run_loop(engine, prompts, sampling=sampling, concurrency=concurrency, progress=progress)
    responses = loop.responses
    return CellResult(
        drafter=cell.label,
        method=cell.spec.method,
        fingerprint=cell.fingerprint,
        k=cell.k,
        start_s=start_s,
        wall_s=loop.wall_s,
        num_responses=len(responses),
        num_refused=len(loop.answers) - len(responses),
        num_output_tokens=sum(generation.num_output_tokens for generation in responses),
        speculation=merged_speculation(responses, loop.drafted),
        by_category=by_category(loop.generations, [prompt.category for prompt in prompts]),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        self_check=None if engine.self_check is None else engine.self_check.to_dict(),
    )
