"""Two asyncio primitives: a shared/exclusive lock and a weighted semaphore.

A suspect row runs alone. The semaphore is first in, first out.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_MOST_WAITING = 32


class Turns:
    """Who may be in the engine: many rows together, or one alone."""

    def __init__(self) -> None:
        self._num_together = 0
        self._num_waiting = 0
        self._is_alone = False
        self._changed = asyncio.Condition()

    @property
    def is_alone(self) -> bool:
        """Whether somebody is alone in it."""
        return self._is_alone

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """In the engine with others; waits while somebody is alone in it or wants to be."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_alone and not self._num_waiting)
            self._num_together += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_together -= 1
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """With nobody else in the engine."""
        async with self._changed:
            self._num_waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._is_alone and not self._num_together)
                self._is_alone = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            async with self._changed:
                self._is_alone = False
                self._changed.notify_all()


class Places:
    """Places in the engine; who comes first has his first.

    Args:
        number: of places.
    """

    def __init__(self, number: int) -> None:
        self._number = self._free = number
        self._door = asyncio.Lock()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, number: int = 1) -> AsyncIterator[None]:
        """Have so many places at once, or all where there are fewer."""
        number = min(number, self._number)
        async with self._door, self._changed:
            await self._changed.wait_for(lambda: self._free >= number)
            self._free -= number
        try:
            yield
        finally:
            async with self._changed:
                self._free += number
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
