"""What an engine says one by one, passed on in fewer and larger pieces; the first at once.

Each piece of a stream costs about two milliseconds of processor time between the engine and the client, in a replica,
the ingress and a proxy, however much is in it (Ray 2.60, AMD EPYC, 2026-11-22: 25.6 % of a core at 114 pieces/s). It
knows asyncio; it knows nothing of answers or Ray.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

T = TypeVar("T")


async def coalesce(source: AsyncGenerator[T, None], interval_s: float) -> AsyncGenerator[list[T], None]:
    """Lists of what comes: of the first alone, then of all that came since the last list, `interval_s` after it.

    Nothing waits longer than that, and what comes after a longer silence does not wait at all. What the source
    raises is raised after what came before. Closing this closes the source.
    """
    arrived: list[T] = []
    news = asyncio.Event()

    async def read() -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    arrived.append(item)
                    news.set()
        finally:
            news.set()

    reader = asyncio.create_task(read())
    clock = asyncio.get_running_loop().time
    earliest = clock()
    try:
        while True:
            await news.wait()
            if (early := earliest - clock()) > 0:
                await asyncio.wait([reader], timeout=early)
            news.clear()
            if arrived:
                passed, arrived[:] = arrived.copy(), []
                earliest = clock() + interval_s
                yield passed
            if reader.done() and not arrived:
                reader.result()
                return
    finally:
        await _end(reader)


async def _end(task: "asyncio.Task[Any]") -> None:
    """Have it end, whatever it does."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # seen, or asyncio would report it
