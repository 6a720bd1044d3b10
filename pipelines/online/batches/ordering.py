"""Taking an order for a batch: once for each `Idempotency-Key`, and no more than a key may have at a time.

Whoever sends an order again, because the answer was lost, gets the batch of the first time. The order is written under
the name of the key before the batch begins, and of several at once the first counts. A crash in between loses nothing:
the next one finds the order there. It knows the store; what a batch may be is `asking.py`.
"""

import asyncio
import hashlib
import threading
from collections import defaultdict
from typing import Any

from peagle.errors import shown
from pipelines.online.batches.asking import NewBatch
from pipelines.online.batches.quota import Quota
from pipelines.online.batches.records import INPUT, WINDOW_S, Batch, Order
from pipelines.online.batches.settings import Shares
from pipelines.online.batches.store import BatchStore
from pipelines.online.batches.threads import in_thread
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord

_MAX_KEY_CHARS = 255
_RETRY_S = 60.0


class Orders:
    """Takes them. Threads may share it."""

    def __init__(self, store: BatchStore, quota: Quota, shares: Shares) -> None:
        self._store, self._quota, self._shares = store, quota, shares
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by the name of a key
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take_in_turn(self, body: NewBatch, key: KeyRecord, idempotency_key: str | None) -> Batch:
        """`take` in a thread, of which a key has one at a time.

        Raises:
            ApiError: as `take`.
        """
        async with self._turns[key.name]:
            return await in_thread(self.take, body, key, idempotency_key)

    def take(self, body: NewBatch, key: KeyRecord, idempotency_key: str | None) -> Batch:
        """A new batch, or the one that this was the order for before.

        Raises:
            ApiError: 400, there is no such input; 413 or 429, the key has as much as it may; 422, the order was another
                one.
        """
        if idempotency_key is None:
            with self._locks[key.name]:
                return self._store.add_batch(self._new(body, key))
        if not (idempotency_key.isprintable() and 0 < len(idempotency_key) <= _MAX_KEY_CHARS):
            message = f"Idempotency-Key: it has to have 1 to {_MAX_KEY_CHARS} printable characters"
            raise ApiError(400, message, code="invalid_value")
        return self._take_once(body, key, hashlib.sha256(f"{key.name} {idempotency_key}".encode()).hexdigest())

    def _take_once(self, body: NewBatch, key: KeyRecord, name: str) -> Batch:
        asked = body.model_dump(mode="json")
        with self._locks[key.name]:
            first = self._store.ordered_as(name)
            if first is None:
                self._store.order_as(name, self._new(body, key), asked)
                first = self._store.ordered_as(name)
            assert first is not None, "it was written"
            return self._begin(first, asked)

    def _begin(self, first: dict[str, Any], asked: dict[str, Any]) -> Batch:
        if first["asked"] != asked:
            message = "Idempotency-Key: it came with another order before; send a new one with a new order"
            raise ApiError(422, message, code="idempotency_key_reused")
        order = Order.from_dict(first["order"])
        return self._store.batch(order.id, order.key.name) or self._store.add_batch(order)

    def _new(self, body: NewBatch, key: KeyRecord) -> Order:
        stored = self._store.file(body.input_file_id, key.name)
        if stored is None or stored.purpose != INPUT:
            message = f"input_file_id: there is no file {shown(body.input_file_id)} with the purpose {INPUT!r}"
            raise ApiError(400, message, code="invalid_input_file", param="input_file_id")
        self._quota.require_room(key)
        self._require_turn(key)
        return body.order(key, self._store.now(), self._store.clock.after(WINDOW_S))

    def _require_turn(self, key: KeyRecord) -> None:
        share, batches = self._shares.of(key), self._store.batches(key.name)
        if sum(not batch.is_over for batch in batches) >= share.max_unfinished_batches:
            message = f"this key may have {share.max_unfinished_batches} batches that have not ended"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_S)
        if len(batches) >= share.max_stored_files and not self._store.forget_oldest(batches):
            message = f"this key keeps {len(batches)} batches, of {share.max_stored_files}: delete files of the oldest"
            raise ApiError(413, message, code="storage_quota_exceeded")
