"""A shared/exclusive lock and a weighted semaphore for asyncio. Both are fair: first in, first out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_MAX_WAITING = 32


class SharedExclusiveLock:
    """A lock that many rows can hold together, or a single row exclusively."""

    def __init__(self) -> None:
        self._num_sharing = 0
        self._num_waiting = 0
        self._is_exclusive = False
        self._changed = asyncio.Condition()

    @property
    def is_exclusive(self) -> bool:
        """Whether the lock is held exclusively."""
        return self._is_exclusive

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the lock together with others. Waits while another task has it exclusively, or waits to do so."""
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
        """Hold the lock exclusively."""
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
    """A FIFO semaphore over engine slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = self._num_free = num_slots
        self._queue_lock = asyncio.Lock()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def acquire(self, num_slots: int = 1) -> AsyncIterator[None]:
        """Hold this many slots, or all slots if there are fewer."""
        num_slots = min(num_slots, self._num_slots)
        async with self._queue_lock, self._changed:
            await self._changed.wait_for(lambda: self._num_free >= num_slots)
            self._num_free -= num_slots
        try:
            yield
        finally:
            async with self._changed:
                self._num_free += num_slots
                self._changed.notify_all()


def rows_in_engine(slots: int) -> int:
    """Return how many rows to give an engine with this many slots: one per slot, and some that wait.

    Rows of equal length end in the same step. If fewer rows wait than end, slots of the next step stay empty. With many
    slots, few rows end together, and every row in an engine is a suspect when the engine crashes.

    >>> [rows_in_engine(slots) for slots in (1, 8, 64, 512)]
    [2, 16, 96, 576]
    """
    return slots + max(min(slots, _MAX_WAITING), slots // 8)
