"""Limits of a key: requests at once and a minute, tokens a minute, budgets.

    admit -> Permit -> settle, by the answer; or later by the ledger, with `catch_up`

A clock is injected, and it knows neither HTTP nor where keys come from. Counts live in one process (the ingress); money
is kept by `budgets.py`.

A request counts before anything else is looked at: those that are refused, that read or that delete cost time too.
Output tokens count when they are known, and until then as many as the request may have, so that no burst of requests
overshoots the limit. An engine counts prompt tokens; until then a request has as many as its bytes, which are more. So
one that is alone under way gets in while the minute has any left, and overshoots it at most by itself. A window slides:
an entry that is a minute old no longer counts.

Of a budget a request holds what it costs alone, its prompt and its output each at their recent price (`sums.py`), until
its own cost is known. One that is alone under way gets in with whatever is left; one of a model without a price gets in
only so. So requests overspend a budget by the last one, and by what some cost beyond what they held. A tag's budget is
held likewise by all requests with the tag. Of the endpoint's nothing is held: its engines cost the same with and
without a request.

The usage of a request whose client left never reaches the ingress; its engine writes it to the ledger, and until it is
read there the request holds what it reserved. So nobody gets tokens for nothing by hanging up. What another ingress let
in is spent too, as soon as its engine has written it.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peagle.economics.tags import NO_TAGS
from peagle.economics.usage import RequestUsage
from pipelines.online.budgets import Refusal
from pipelines.online.errors import ApiError, overloaded
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.shared import Payer, SharedBudgets
from pipelines.online.gateway.windows import MinuteWindow, TokenWindow, check_input, check_output, too_many
from pipelines.online.sums import TokenPrice
from pipelines.online.totals import Totals

POLLS_PER_MIN = 60  # of a key that has a limit of requests: two pages, each of which asks every two seconds
_BATCH_RETRY_S = 60.0  # or that of a batch
_NO_PRICE = TokenPrice()
_LOOK_S = 1.0
_LOOK_ANYWAY_S = 30.0  # for batches that have ended
_YOUNG_S = 120.0  # after a start, engines write what the ingress before this one let in
_GIVE_UP_S = 120.0  # an engine that was killed writes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The usage of a request that has ended."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0


@dataclass(slots=True, kw_only=True)
class Permit:
    """An admitted request; give it back with `KeyLimits.settle` when it has ended.

    Attributes:
        payers: accounts of which it holds something: its key's and its tags'.
        prompt_tokens, output_tokens: that it reserves.
    """

    account: str
    payers: Sequence[str]
    request_id: str
    prompt_tokens: int
    output_tokens: int
    is_being_answered: bool = True


@dataclass(slots=True)
class _Counts:
    """The counts of one account."""

    requests: MinuteWindow = field(default_factory=MinuteWindow)
    polls: MinuteWindow = field(default_factory=MinuteWindow)
    prompt_tokens: TokenWindow = field(default_factory=TokenWindow)
    output_tokens: TokenWindow = field(default_factory=TokenWindow)
    num_being_answered: int = 0


class KeyLimits:
    """The limits of all keys.

    Args:
        totals: of the ledger; what it holds now was spent before. It is read beside everything else.
        monotonic: seconds; only differences matter.
    """

    def __init__(self, totals: Totals, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._totals, self._budgets = totals, totals.budgets
        self._shared = SharedBudgets(totals.folder)
        self._monotonic = monotonic
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)
        self._permits: dict[str, Permit] = {}  # by the request's id, until its answer or the ledger has told
        self._waiting: dict[str, float] = {}  # for the ledger alone, since when
        self._without_price: set[str] = set()  # models that keys with a budget have asked for
        self._heard: deque[RequestUsage] = deque()  # by whichever thread reads the ledger
        self._started_at = monotonic()
        self._looked_at = -math.inf
        self._look_task: asyncio.Task[None] | None = None
        totals.follow(self)
        totals.read_in_background()

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
        counts = self._counts[key.account]
        window, limit = (counts.polls, POLLS_PER_MIN) if is_poll else (counts.requests, key.requests_per_min)
        now = self._monotonic()
        window.expire(now)
        if window.total >= limit:
            wait_s = window.wait_s(now, window.total - limit + 1)
            counted = "requests for figures" if is_poll else "requests"
            raise too_many(f"this key may make {limit} {counted} a minute", wait_s)
        window.add(now, 1)

    async def require_budget(self, key: KeyRecord, tags: str = NO_TAGS) -> None:
        """Refuse free actions, such as a file or an order, once a budget is spent.

        Args:
            tags: as `admit`.

        Raises:
            ApiError: 429 and 503, as `admit`.
        """
        payers: list[Payer] = [key, *self._shared.of_tags(tags), *self._shared.of_endpoint()]
        await self._know_spending(payers)
        self._require_budgets(payers, is_free=True)

    async def admit(
        self,
        key: KeyRecord,
        model: str,
        *,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        tags: str = NO_TAGS,
    ) -> Permit:
        """Let a request in that may have so many tokens of this model.

        Args:
            request_id: by which the ledger will name it.
            tags: all of the request's, as the ledger will have them.

        Raises:
            ApiError: 429, with the time after which another attempt makes sense; 400 where none does; 503, a budget
                pays for it, and what is spent is not known yet.
        """
        payers: list[Payer] = [key, *self._shared.of_tags(tags)]
        endpoint = self._shared.of_endpoint()
        await self._know_spending([*payers, *endpoint])
        if _with_budget(payers) and model not in self._totals.prices:
            self._without_price.add(model)
        counts = self._counts[key.account]
        self._require_budgets(payers)
        self._require_budgets(endpoint, is_free=True)  # its engines cost the same without the request
        _check_parallel(key, counts)
        now = self._monotonic()
        check_output(key, counts.output_tokens, now, output_tokens)
        check_input(key, counts.prompt_tokens, now, prompt_tokens)
        price = self._totals.prices.get(model, _NO_PRICE)
        usd = price.of(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self._hold(request_id, payers, usd)
        counts.prompt_tokens.reserved += prompt_tokens
        counts.output_tokens.reserved += output_tokens
        counts.num_being_answered += 1
        permit = Permit(
            account=key.account,
            payers=[payer.account for payer in payers],
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )
        self._permits[request_id] = permit
        return permit

    def settle(self, permit: Permit, used: Used | None) -> None:
        """Take a permit back; settling it again changes nothing.

        Args:
            used: as the answer has said; None where nobody waited for that, and the ledger will say it. The ledger may
                have done so already: an engine may be done before the ingress is.
        """
        self._leave(permit)
        if permit.request_id not in self._permits:
            return
        if used is None:
            self._waiting[permit.request_id] = self._monotonic()
        else:
            self._end(permit.request_id, used)

    async def catch_up(self) -> None:
        """Settle what the ledger has told, at most once a second.

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

    # --- as a follower of the ledger

    def begin(self, totals: Totals) -> None:
        """Begin at the ledger's end: older records count for budgets alone."""

    def hear(self, request: RequestUsage) -> None:
        """Note what the ledger says of a request that was let in here."""
        if request.request_id in self._permits:
            self._heard.append(request)

    def _allowed_usd(self, payer: Payer) -> float | None:
        return self._budgets.allowed_usd(payer.account, payer.budget_usd, payer.budget_every)

    def _require_budgets(self, payers: Iterable[Payer], *, is_free: bool = False) -> None:
        for payer in payers:
            _raise(payer, self._budgets.refusal(payer.account, self._allowed_usd(payer), is_free=is_free))

    def _hold(self, request_id: str, payers: Sequence[Payer], usd: float | None) -> None:
        """Hold what a request may cost of each budget, or of none."""
        for index, payer in enumerate(payers):
            refusal = self._budgets.hold_request(request_id, payer.account, self._allowed_usd(payer), usd)
            if refusal:
                for earlier in payers[:index]:
                    self._budgets.let_go(request_id, earlier.account)
                _raise(payer, refusal)

    async def _know_spending(self, payers: Sequence[Payer]) -> None:
        if self._totals.is_known:
            await self.catch_up()
        elif _with_budget(payers) and not await self._totals.is_known_soon():
            raise overloaded("the spend of this key is still being read; try again")

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
            if request.request_id in self._permits:
                usage = request.usage
                used = Used(
                    prompt_tokens=usage.num_prompt_tokens, output_tokens=usage.num_output_tokens, usd=request.usd
                )
                self._end(request.request_id, used)
        overdue = [request_id for request_id, since in self._waiting.items() if since < now - _GIVE_UP_S]
        for request_id in overdue:
            self._end(request_id, None)  # a late record is spent all the same
        self._budgets.forget(now - _GIVE_UP_S)

    def _leave(self, permit: Permit) -> None:
        """Nobody waits for the answer any more."""
        if permit.is_being_answered:
            permit.is_being_answered = False
            self._counts[permit.account].num_being_answered -= 1

    def _end(self, request_id: str, used: Used | None) -> None:
        """Let go what a request reserved, and count what it used.

        Args:
            used: None where nobody will ever say.
        """
        permit = self._permits.pop(request_id)
        self._waiting.pop(request_id, None)
        self._leave(permit)
        counts, now, known = self._counts[permit.account], self._monotonic(), used or Used()
        counts.prompt_tokens.settle(now, permit.prompt_tokens, known.prompt_tokens)
        counts.output_tokens.settle(now, permit.output_tokens, known.output_tokens)
        for account in permit.payers:
            if used is None:
                self._budgets.let_go(request_id, account)
            else:
                self._budgets.settle_request(request_id, account, used.usd)


def _with_budget(payers: Iterable[Payer]) -> bool:
    return any(payer.budget_usd is not None for payer in payers)


def _check_parallel(key: KeyRecord, counts: _Counts) -> None:
    limit = key.max_parallel_requests
    if limit is not None and counts.num_being_answered >= limit:
        raise too_many(f"this key may have {limit} concurrent requests", None)


def _raise(payer: Payer, refusal: Refusal | None) -> None:
    """Say of a budget why it does not reach."""
    if refusal is None:
        return
    budget = payer.describe_budget()
    if refusal == "spent":
        raise ApiError(429, f"{budget} is spent", code="insufficient_quota")
    if refusal == "held by a batch":
        raise too_many(f"the rest of {budget} is reserved by a batch until it ends", _BATCH_RETRY_S)
    if refusal == "held by requests":
        raise too_many(f"the rest of {budget} is reserved by running requests until they end", None)
