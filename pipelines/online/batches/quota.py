"""How much a key may keep, in bytes and in files: outputs of its batches count, and uploads while they arrive.

An upload takes its bytes before they come, so several at once cannot overshoot together. What batches will make is not
known before it is there: it may go beyond, and then nothing new is taken. It knows the store.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pipelines.online.batches.settings import MIB, Shares
from pipelines.online.batches.store import BatchStore
from pipelines.online.batches.threads import in_thread
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord


class Quota:
    """What keys keep, and what is on its way to them. Threads may share it."""

    def __init__(self, store: BatchStore, shares: Shares) -> None:
        self._store, self._shares = store, shares
        self._lock = threading.Lock()
        self._arriving_bytes: Counter[str] = Counter()
        self._arriving_files: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def hold(self, key: KeyRecord, num_bytes: int) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Take room for a file that is about to arrive, until its record is there or nothing came of it. The `with`
        gets a function that does in a thread what makes the record: it goes on, and holds the room, where the client
        leaves.

        Raises:
            ApiError: 413, there is no room.
        """
        self._arrive(key, num_bytes, 1)
        doing: list[asyncio.Task[Any]] = []

        async def held(function: Callable[..., Any], *arguments: Any) -> Any:
            doing.append(asyncio.create_task(in_thread(function, *arguments)))
            return await asyncio.shield(doing[-1])

        try:
            await in_thread(self._require, key)
            yield held
        finally:
            if doing and not doing[-1].done():
                doing[-1].add_done_callback(lambda _: self._arrive(key, -num_bytes, -1))
            else:
                self._arrive(key, -num_bytes, -1)

    def require_room(self, key: KeyRecord) -> None:
        """Make sure that a batch's outputs can be kept, as far as anybody knows.

        Raises:
            ApiError: 413, the key keeps as much as it may already.
        """
        self._require(key, num_bytes=1, num_files=1)

    def _arrive(self, key: KeyRecord, num_bytes: int, num_files: int) -> None:
        with self._lock:
            self._arriving_bytes[key.name] += num_bytes
            self._arriving_files[key.name] += num_files

    def _require(self, key: KeyRecord, *, num_bytes: int = 0, num_files: int = 0) -> None:
        """See whether all that a key has, and that arrives, and as much more, is within its share."""
        share, files = self._shares.of(key), self._store.files(key.name)
        num_files += len(files) + self._arriving_files[key.name]
        num_bytes += sum(file.num_bytes for file in files) + self._arriving_bytes[key.name]
        if num_files > share.max_stored_files:
            raise _full(f"{share.max_stored_files} files")
        if num_bytes > share.max_stored_mib * MIB:
            raise _full(f"{share.max_stored_mib} MiB, and this would be {-(-num_bytes // MIB)}")


def _full(most: str) -> ApiError:
    message = f"this key may keep {most}, uploads under way included; delete files that are not needed"
    return ApiError(413, message, code="storage_quota_exceeded")
