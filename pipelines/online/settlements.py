"""Limits kept true to the ledger: what keys have spent before and on batches, and what requests used whose client left
or whose time was over.

Such a request's usage never reaches the ingress; its engine writes it to the ledger, and until it is read there the
request holds what it reserved. So nobody gets tokens for nothing by hanging up. It knows no HTTP.
"""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

from peagle.economics.ledger import RequestReader
from peagle.economics.usage import RequestUsage
from pipelines.online.budgets import budgets_of
from pipelines.online.limits import Limiter, Permit

_LOOK_S = 1.0
_LOOK_ANYWAY_S = 30.0  # for batches that have ended
_GIVE_UP_S = 120.0  # an engine that was killed writes nothing


class Settlements:
    """The limiter, and the permits that wait for the ledger.

    Args:
        folder: of the ledger; what it holds now was spent before.
    """

    def __init__(self, folder: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._reader = RequestReader(folder)
        self._monotonic = monotonic
        self._waiting: dict[str, tuple[float, Permit]] = {}
        self._unclaimed: dict[str, tuple[float, RequestUsage]] = {}  # in the order in which they were read
        self._looked_at = -math.inf
        self._look_task: asyncio.Task[None] | None = None
        self._budgets = budgets_of(folder)
        self.limiter = Limiter(budgets=self._budgets, monotonic=monotonic)
        for request in self._reader.each():
            if request.is_batch:
                self._budgets.settle_batch(request.request_id, request.key, request.usd)
            else:
                tokens = request.usage.num_output_tokens
                self.limiter.spend(request.key, request.model, output_tokens=tokens, usd=request.usd)

    def defer(self, request_id: str, permit: Permit) -> None:
        """The ledger will say what this request used, or has said so: an engine may be done before the ingress is."""
        if unclaimed := self._unclaimed.pop(request_id, None):
            self._settle(permit, unclaimed[1])
        else:
            self._waiting[request_id] = (self._monotonic(), permit)

    async def catch_up(self) -> None:
        """Settle what the ledger has by now; looks at it once a second at most, and seldom when nothing waits."""
        now = self._monotonic()
        is_looking = self._look_task is not None and not self._look_task.done()
        if is_looking or now < self._looked_at + (_LOOK_S if self._waiting else _LOOK_ANYWAY_S):
            return
        self._looked_at = now
        # It goes on where the client leaves for whom it was: what has been read is not read again.
        self._look_task = asyncio.create_task(self._look(now))
        await asyncio.shield(self._look_task)

    async def _look(self, now: float) -> None:
        for request in await asyncio.to_thread(self._reader.new):
            if waiting := self._waiting.pop(request.request_id, None):
                self._settle(waiting[1], request)
            elif request.is_batch:
                self._budgets.settle_batch(request.request_id, request.key, request.usd)
            else:
                self._unclaimed[request.request_id] = (now, request)
        self._forget(now)

    def _settle(self, permit: Permit, request: RequestUsage) -> None:
        self.limiter.settle(permit, output_tokens=request.usage.num_output_tokens, usd=request.usd)

    def _forget(self, now: float) -> None:
        """Let go what nothing more will be heard of."""
        for request_id, (since, permit) in list(self._waiting.items()):
            if now - since > _GIVE_UP_S:
                del self._waiting[request_id]
                self.limiter.settle(permit, output_tokens=0, usd=0.0)
        while self._unclaimed:
            request_id, (since, _) = next(iter(self._unclaimed.items()))
            if now - since <= _GIVE_UP_S:
                return
            del self._unclaimed[request_id]
