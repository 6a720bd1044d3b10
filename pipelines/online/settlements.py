"""Limits kept true to the ledger: what keys have spent before and on batches, and what requests used whose client left
or whose time was over.

Such a request's usage never reaches the ingress; its engine writes it to the ledger, and until it is read there the
request holds what it reserved. So nobody gets tokens for nothing by hanging up. What another ingress let in is spent
too, as soon as its engine has written it. It knows no HTTP but the refusal of whom it cannot judge yet.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from peagle.economics.usage import RequestUsage
from pipelines.online.budgets import budgets_of
from pipelines.online.errors import overloaded
from pipelines.online.keys import KeyRecord
from pipelines.online.limits import Limiter, Permit
from pipelines.online.totals import Totals, totals_of

_LOOK_S = 1.0
_LOOK_ANYWAY_S = 30.0  # for batches that have ended
_YOUNG_S = 120.0  # after a start, engines write what the ingress before this one let in
_GIVE_UP_S = 120.0  # an engine that was killed writes nothing


class Settlements:
    """The limiter, and the permits of requests of which the ledger has said nothing yet.

    Args:
        folder: of the ledger; what it holds now was spent before. It is read beside everything else.
    """

    def __init__(self, folder: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._permits: dict[str, Permit] = {}  # by the request's id, until its answer or the ledger has told
        self._waiting: dict[str, float] = {}  # for the ledger alone, since when
        self._without_price: set[str] = set()  # models that keys with a budget have asked for
        self._heard: deque[RequestUsage] = deque()  # by whichever thread reads the ledger
        self._started_at = monotonic()
        self._looked_at = -math.inf
        self._look_task: asyncio.Task[None] | None = None
        self._budgets, self._totals = budgets_of(folder), totals_of(folder)
        self.limiter = Limiter(self._budgets, self._totals.prices, monotonic=monotonic)
        self._totals.follow(self)
        self._totals.read_in_background()

    def begin(self, totals: Totals) -> None:
        """What was there before is a matter of budgets alone."""

    def hear(self, request: RequestUsage) -> None:
        """Note what the ledger says of a request that was let in here."""
        if request.request_id in self._permits:
            self._heard.append(request)

    async def require_budget(self, key: KeyRecord) -> None:
        """Let in what costs nothing by itself.

        Raises:
            ApiError: as `Limiter.require_budget`; 503, its key has a budget, and what it has spent is not known yet.
        """
        await self._catch_up(key)
        self.limiter.require_budget(key)

    async def admit(
        self, key: KeyRecord, output_tokens: int, model: str, *, prompt_tokens: int, request_id: str
    ) -> Permit:
        """Let a request in; its permit goes back by `settle` or `defer`.

        Raises:
            ApiError: as `Limiter.admit`; 503, its key has a budget, and what it has spent is not known yet.
        """
        await self._catch_up(key)
        if key.budget_usd is not None and model not in self._totals.prices:
            self._without_price.add(model)
        permit = self.limiter.admit(key, output_tokens, model, prompt_tokens=prompt_tokens, request_id=request_id)
        self._permits[request_id] = permit
        return permit

    def settle(self, permit: Permit, *, output_tokens: int, usd: float) -> None:
        """A request's answer has told what it used."""
        self._permits.pop(permit.request_id, None)
        self.limiter.settle(permit, output_tokens=output_tokens, usd=usd)

    def defer(self, permit: Permit) -> None:
        """The ledger will say what this request used, or has said so: an engine may be done before the ingress is."""
        self.limiter.leave(permit)
        if permit.request_id in self._permits:
            self._waiting[permit.request_id] = self._monotonic()

    async def _catch_up(self, key: KeyRecord) -> None:
        if self._budgets.is_known:
            await self.catch_up()
        elif key.budget_usd is not None and not await self._totals.is_known_soon():
            raise overloaded("what this key has spent is being read; try again")

    async def catch_up(self) -> None:
        """Settle what the ledger has by now; looks at it once a second at most, and seldom when nothing waits."""
        now = self._monotonic()
        is_looking = self._look_task is not None and not self._look_task.done()
        if is_looking or now < self._looked_at + self._pause_s(now):
            return
        self._looked_at = now
        # It goes on where the client leaves for whom it was: what has been read is not read again.
        self._look_task = asyncio.create_task(self._look(now))
        await asyncio.shield(self._look_task)

    def _pause_s(self, now: float) -> float:
        """Between two looks: short where the ledger is waited for, or says first what tokens cost."""
        is_awaited = self._waiting or self._without_price or now < self._started_at + _YOUNG_S
        return _LOOK_S if is_awaited else _LOOK_ANYWAY_S

    async def _look(self, now: float) -> None:
        await asyncio.to_thread(self._totals.catch_up)
        self._without_price -= self._totals.prices.keys()
        while self._heard:
            request = self._heard.popleft()
            self._waiting.pop(request.request_id, None)
            if permit := self._permits.pop(request.request_id, None):
                self.limiter.settle(permit, output_tokens=request.usage.num_output_tokens, usd=request.usd)
        self._give_up(now - _GIVE_UP_S)

    def _give_up(self, before: float) -> None:
        """Wait no longer for what should have been in the ledger by now; where it comes all the same, it is spent."""
        for request_id, since in list(self._waiting.items()):
            if since < before:
                del self._waiting[request_id]
                self.limiter.settle(self._permits.pop(request_id), output_tokens=0, usd=None)
        self._budgets.forget(before)
