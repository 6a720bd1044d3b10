"""Bodies that take long to read, in threads: a few at once, one of each key at a time.

Python runs one thread at a time, and hands over every five milliseconds, so that streams go on meanwhile; what is read
must be made of short steps for that. It knows no HTTP.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

AT_ONCE = 2
_SHORT_BYTES = 16 * 1024  # a hundredth of a second at most, and half a millisecond for what people send
_P = ParamSpec("_P")
_T = TypeVar("_T")


class HeavyWork:
    """The threads, and whose turn it is."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bodies")
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    async def run(
        self, key: str, num_bytes: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """The function's result, or what it raises.

        Args:
            key: whose body it is; while one is read, the key's others wait and those of other keys do not.
            num_bytes: of the body; a short one is read at once.
        """
        if num_bytes <= _SHORT_BYTES:
            return function(*args, **kwargs)
        lock, num_waiting = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = lock, num_waiting + 1
        try:
            async with lock:
                return await self._in_thread(lambda: function(*args, **kwargs))
        finally:
            lock, num_waiting = self._turns.pop(key)
            if num_waiting > 1:
                self._turns[key] = lock, num_waiting - 1

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be stopped: the key's turn ends when it has, though the client has left.
            await asyncio.wait([future])
            raise
