"""Limits of a key, kept true to the ledger: requests, tokens, budget.

Requests at once, requests and output tokens of the last minute.

A clock is injected, and it knows neither HTTP nor where keys come from. Counts live in one process (the ingress); money
is kept by `budgets.py`.

A request counts before anything else is looked at: those that are refused, that read or that delete cost time too.
Output tokens count when they are known, and until then as many as the request may have, so that no burst of requests
overshoots the limit. A window slides: what is a minute old no longer counts.

Of a budget a request holds what it costs alone, its prompt and its output each at their price of late
(`sums.py`), until its own cost is known. One that is alone under way gets in with whatever is left; one of a
model without a price gets in only so. So requests overspend a budget by the last one, and by what some cost beyond what
they held.

The usage of a request whose client left never reaches the ingress; its engine writes it to the ledger, and until it is
read there the request holds what it reserved. So nobody gets tokens for nothing by hanging up. What another ingress let
in is spent too, as soon as its engine has written it.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peagle.economics.usage import RequestUsage
from pipelines.online.errors import ApiError, overloaded
from pipelines.online.gateway.budgets import Budgets, Refusal, budgets_of
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.sums import TokenPrice
from pipelines.online.totals import Totals, totals_of

WINDOW_S = 60.0
POLLS_PER_MIN = 60  # of a key that has a limit of requests: two pages, each of which asks every two seconds
_BUSY_RETRY_S = 1.0  # when only the end of requests under way can make room
_BATCH_RETRY_S = 60.0  # or that of a batch
_NO_PRICE = TokenPrice()


@dataclass(slots=True)
class Permit:
    """An admitted request; give it back with `Limiter.settle` when it has ended."""

    key: str
    request_id: str
    reserved_tokens: int
    is_being_answered: bool = True
    is_settled: bool = False


@dataclass(slots=True)
class _Window:
    """Amounts of the last minute."""

    entries: deque[tuple[float, int]] = field(default_factory=deque)
    total: int = 0

    def add(self, now: float, amount: int) -> None:
        self.entries.append((now, amount))
        self.total += amount

    def expire(self, now: float) -> None:
        while self.entries and self.entries[0][0] <= now - WINDOW_S:
            self.total -= self.entries.popleft()[1]

    def wait_s(self, now: float, excess: int) -> float | None:
        """Seconds until `excess` of the total expire; None if it would not be enough."""
        for at, amount in self.entries:
            excess -= amount
            if excess <= 0:
                return at + WINDOW_S - now
        return None


@dataclass(slots=True)
class _Usage:
    requests: _Window = field(default_factory=_Window)
    polls: _Window = field(default_factory=_Window)
    tokens: _Window = field(default_factory=_Window)
    reserved_tokens: int = 0
    num_being_answered: int = 0


class Limiter:
    """Counts by key.

    Args:
        budgets: what keys have spent and hold.
        prices: of each model's tokens, as they are learned.
        monotonic: seconds; only differences matter.
    """

    def __init__(
        self,
        budgets: Budgets,
        prices: Mapping[str, TokenPrice],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._budgets = budgets
        self._prices = prices
        self._usage: defaultdict[str, _Usage] = defaultdict(_Usage)

    def count(self, key: KeyRecord, *, is_poll: bool = False) -> None:
        """Count a request, whatever becomes of it.

        A request that is refused here does not count.

        Args:
            is_poll: it counts in a window of its own, as the page asks for figures every two seconds.

        Raises:
            ApiError: 429, with the time after which another attempt makes sense.
        """
        if key.requests_per_min is None:
            return
        usage = self._usage[key.account]
        window, limit = (usage.polls, POLLS_PER_MIN) if is_poll else (usage.requests, key.requests_per_min)
        now = self._monotonic()
        window.expire(now)
        if window.total >= limit:
            wait_s = window.wait_s(now, window.total - limit + 1)
            what = "requests for live figures" if is_poll else "requests"
            raise _too_many(f"this key may make {limit} {what} a minute", wait_s)
        window.add(now, 1)

    def require_budget(self, key: KeyRecord) -> None:
        """Refuse free actions, such as a file or an order, to a key without budget.

        Raises:
            ApiError: 429, as `admit`.
        """
        _raise(key, self._budgets.refusal(key.account, key.budget_usd, is_free=True))

    def admit(self, key: KeyRecord, output_tokens: int, model: str, *, prompt_tokens: int, request_id: str) -> Permit:
        """Let a request in that may have so many tokens of this model.

        Args:
            request_id: by which the ledger will name it.

        Raises:
            ApiError: 429, with the time after which another attempt makes sense; 400 where none does.
        """
        now, usage = self._monotonic(), self._usage[key.account]
        usage.tokens.expire(now)
        _raise(key, self._budgets.refusal(key.account, key.budget_usd))
        self._check_parallel(key, usage)
        self._check_tokens(key, usage, now, output_tokens)
        price = self._prices.get(model, _NO_PRICE)
        usd = price.of(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        _raise(key, self._budgets.hold_request(request_id, key.account, key.budget_usd, usd))
        usage.reserved_tokens += output_tokens
        usage.num_being_answered += 1
        return Permit(key.account, request_id, output_tokens)

    def leave(self, permit: Permit) -> None:
        """Nobody waits for the answer any more; what it costs is not known yet."""
        if permit.is_being_answered:
            permit.is_being_answered = False
            self._usage[permit.key].num_being_answered -= 1

    def settle(self, permit: Permit, *, output_tokens: int, usd: float | None) -> None:
        """Settle an ended request with its tokens and cost; once only.

        Args:
            usd: None where nobody will say.
        """
        self.leave(permit)
        if permit.is_settled:
            return
        permit.is_settled = True
        usage = self._usage[permit.key]
        usage.reserved_tokens -= permit.reserved_tokens
        if output_tokens:
            usage.tokens.add(self._monotonic(), output_tokens)
        if usd is None:
            self._budgets.let_go(permit.request_id, permit.key)
        else:
            self._budgets.settle_request(permit.request_id, permit.key, usd)

    def _check_parallel(self, key: KeyRecord, usage: _Usage) -> None:
        limit = key.max_parallel_requests
        if limit is not None and usage.num_being_answered >= limit:
            raise _too_many(f"this key may have {limit} requests under way at once", None)

    def _check_tokens(self, key: KeyRecord, usage: _Usage, now: float, output_tokens: int) -> None:
        limit = key.output_tokens_per_min
        if limit is None:
            return
        if output_tokens > limit:
            raise ApiError(
                400,
                f"this key may have {limit} output tokens a minute, and the request asks for {output_tokens}",
                code="max_tokens_too_large",
                param="max_tokens",
            )
        excess = usage.tokens.total + usage.reserved_tokens + output_tokens - limit
        if excess > 0:
            wait_s = usage.tokens.wait_s(now, excess)
            raise _too_many(f"this key may have {limit} output tokens a minute", wait_s)


def _raise(key: KeyRecord, refusal: Refusal | None) -> None:
    """Say of a budget why it does not reach."""
    budget = f"the budget of ${key.budget_usd:g} of this key" if key.budget_usd is not None else ""
    if refusal == "spent":
        raise ApiError(429, f"{budget} is spent", code="insufficient_quota")
    if refusal == "held by a batch":
        raise _too_many(f"what is left of {budget} is held by its batch until that has ended", _BATCH_RETRY_S)
    if refusal == "held by requests":
        raise _too_many(f"what is left of {budget} is held by its requests under way until they have ended", None)


def _too_many(message: str, wait_s: float | None) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_BUSY_RETRY_S if wait_s is None else wait_s)


_LOOK_S = 1.0
_LOOK_ANYWAY_S = 30.0  # for batches that have ended
_YOUNG_S = 120.0  # after a start, engines write what the ingress before this one let in
_GIVE_UP_S = 120.0  # an engine that was killed writes nothing


class Settlements:
    """The limiter, and permits of requests that the ledger has not named yet.

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
        """Begin at the ledger's end: older records count for budgets alone."""

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
        """Leave a request's settlement to the ledger.

        It may have the record already: an engine may be done before the ingress is.
        """
        self.limiter.leave(permit)
        if permit.request_id in self._permits:
            self._waiting[permit.request_id] = self._monotonic()

    async def _catch_up(self, key: KeyRecord) -> None:
        if self._budgets.is_known:
            await self.catch_up()
        elif key.budget_usd is not None and not await self._totals.is_known_soon():
            raise overloaded("what this key has spent is being read; try again")

    async def catch_up(self) -> None:
        """Settle the ledger's new records, at most once a second.

        Seldom when nothing waits.
        """
        now = self._monotonic()
        is_looking = self._look_task is not None and not self._look_task.done()
        if is_looking or now < self._looked_at + self._pause_s(now):
            return
        self._looked_at = now
        # It goes on where the client leaves for whom it was: what has been read is not read again.
        self._look_task = asyncio.create_task(self._look(now))
        await asyncio.shield(self._look_task)

    def _pause_s(self, now: float) -> float:
        """Seconds between two looks.

        Short where the ledger is waited for, or says first what tokens cost.
        """
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
        """Stop waiting for overdue records; a late one is spent all the same."""
        for request_id, since in list(self._waiting.items()):
            if since < before:
                del self._waiting[request_id]
                self.limiter.settle(self._permits.pop(request_id), output_tokens=0, usd=None)
        self._budgets.forget(before)
