"""Two asyncio primitives: a shared/exclusive lock and a weighted semaphore.

A suspect row runs alone. The semaphore is first in, first out.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_MOST_WAITING = 32


class SharedExclusiveLock:
    """Who may be in the engine: many rows together, or one alone."""

    def __init__(self) -> None:
        self._num_sharing = 0
        self._num_waiting = 0
        self._is_exclusive = False
        self._changed = asyncio.Condition()

    @property
    def is_exclusive(self) -> bool:
        """Whether somebody holds it alone."""
        return self._is_exclusive

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold it with others; waits while somebody holds it alone or wants to."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_exclusive and not self._num_waiting)
            self._num_sharing += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_sharing -= 1
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold it alone."""
        async with self._changed:
            self._num_waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._is_exclusive and not self._num_sharing)
                self._is_exclusive = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            async with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()


class WeightedSemaphore:
    """Slots in the engine; who comes first has his first.

    Args:
        num_slots: that there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = self._num_free = num_slots
        self._door = asyncio.Lock()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, num_slots: int = 1) -> AsyncIterator[None]:
        """Hold so many slots at once, or all where there are fewer."""
        num_slots = min(num_slots, self._num_slots)
        async with self._door, self._changed:
            await self._changed.wait_for(lambda: self._num_free >= num_slots)
            self._num_free -= num_slots
        try:
            yield
        finally:
            async with self._changed:
                self._num_free += num_slots
                self._changed.notify_all()


def rows_in_engine(slots: int) -> int:
    """Rows to give an engine that decodes so many at once.

    Those, and some that wait in it.

    Rows of equal length end in the same step; where fewer wait than end, the next step computes less than it could.
    With many slots few end at once, and what is in an engine when it dies is under suspicion.

    >>> [rows_in_engine(slots) for slots in (1, 8, 64, 512)]
    [2, 16, 96, 576]
    """
    return slots + max(min(slots, _MOST_WAITING), slots // 8)
