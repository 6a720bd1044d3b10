"""Limits of API keys: requests and tokens per minute, concurrent requests, budgets.

    admit -> Permit -> settle with the answer's usage, or later with the ledger's (`catch_up`)

Every request counts when it arrives. Tokens and cost are reserved at their maximum until the actual number is known, so
that a burst cannot exceed a limit. The maximum number of prompt tokens is the size of the body, which can be far too
high. So a key's only running request may use all that is left of the minute and of the key's budgets. A request
for a model without a price (`totals.py`) can only run alone. So a budget is exceeded by at most one request, plus the
amount by which estimated prices are too low.

If a client disconnects, the reservation stays until the engine has written the usage to the ledger. Rate limits are
kept in memory, since there is only one ingress.
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
from pipelines.online.gateway.keys import KeyRecord, Payer, SharedBudgets
from pipelines.online.totals import Totals

WINDOW_S = 60.0
_BUSY_RETRY_S = 1.0  # retry time if the wait depends on running requests
POLLS_PER_MIN = 60  # per key with a rate limit: two pages that poll every two seconds
_BATCH_RETRY_S = 60.0  # retry time if a batch has reserved the rest of the budget
_POLL_S = 1.0
_IDLE_POLL_S = 30.0  # interval while no request waits, to find the cost of ended batches
_STARTUP_S = 120.0  # after a start, engines still write records of the previous ingress's requests
_LEDGER_TIMEOUT_S = 120.0  # a killed engine never writes its records


@dataclass(slots=True)
class MinuteWindow:
    """The amounts of the last minute, and their total."""

    entries: deque[tuple[float, int]] = field(default_factory=deque)
    total: int = 0

    def add(self, now: float, amount: int) -> None:
        self.entries.append((now, amount))
        self.total += amount

    def expire(self, now: float) -> None:
        while self.entries and self.entries[0][0] <= now - WINDOW_S:
            self.total -= self.entries.popleft()[1]

    def wait_s(self, now: float, excess: int) -> float | None:
        """Return the seconds until `excess` of the total has expired, or None if the total is smaller."""
        for added_at, amount in self.entries:
            excess -= amount
            if excess <= 0:
                return added_at + WINDOW_S - now
        return None


@dataclass(slots=True)
class TokenWindow:
    """Tokens of the last minute: the actual number for finished requests, the maximum for running requests."""

    counted: MinuteWindow = field(default_factory=MinuteWindow)
    reserved: int = 0

    def excess(self, now: float, tokens: int, limit: int) -> int:
        """Return by how much `tokens` additional tokens would exceed the limit; 0 or less if they fit."""
        self.counted.expire(now)
        return self.counted.total + self.reserved + tokens - limit

    def settle(self, now: float, reserved: int, used: int) -> None:
        self.reserved -= reserved
        if used:
            self.counted.add(now, used)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActualUsage:
    prompt_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0


@dataclass(slots=True, kw_only=True)
class Permit:
    """An admitted request. Release it with `KeyLimits.settle`."""

    account: str
    reserved_accounts: Sequence[str]  # accounts of the key and its tags that have a reservation
    request_id: str
    prompt_tokens: int  # reserved, like `output_tokens`
    output_tokens: int
    is_running: bool = True


@dataclass(slots=True)
class _Counts:
    requests: MinuteWindow = field(default_factory=MinuteWindow)
    polls: MinuteWindow = field(default_factory=MinuteWindow)
    prompt_tokens: TokenWindow = field(default_factory=TokenWindow)
    output_tokens: TokenWindow = field(default_factory=TokenWindow)
    num_running: int = 0


class KeyLimits:
    """The limits of all keys. Reads the ledger's totals in the background."""

    def __init__(self, totals: Totals, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._totals, self._budgets = totals, totals.budgets
        self._shared = SharedBudgets(totals.folder)
        self._monotonic = monotonic
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)
        self._permits: dict[str, Permit] = {}  # by request id, until settled
        self._waiting: dict[str, float] = {}  # request id -> start of the wait for its usage in the ledger
        self._unpriced_models: set[str] = set()  # models without a price that keys with a budget have requested
        self._ledger_records: deque[RequestUsage] = deque()  # filled by the thread that reads the ledger
        self._started_at = monotonic()
        self._polled_at = -math.inf
        self._poll_task: asyncio.Task[None] | None = None
        totals.add_follower(self)
        totals.read_in_background()

    def count_request(self, key: KeyRecord, *, is_poll: bool = False) -> None:
        """Count a request against the rate limit, or refuse it (429) without counting it.

        `is_poll` selects the separate limit for the web page's polling.
        """
        if key.requests_per_min is None:
            return
        counts = self._counts[key.account]
        window, limit = (counts.polls, POLLS_PER_MIN) if is_poll else (counts.requests, key.requests_per_min)
        now = self._monotonic()
        window.expire(now)
        if window.total >= limit:
            wait_s = window.wait_s(now, window.total - limit + 1)
            noun = "usage requests" if is_poll else "requests"
            raise _rate_limit_error(f"this key may make {limit} {noun} a minute", wait_s)
        window.add(now, 1)

    async def require_budget(self, key: KeyRecord, tags: str = NO_TAGS) -> None:
        """Refuse (429) an action that costs nothing yet, such as an upload or a new batch, if a budget is spent."""
        payers: list[Payer] = [key, *self._shared.of_tags(tags), *self._shared.of_endpoint()]
        await self._wait_for_spend(payers)
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
        """Admit a request and reserve its tokens and cost.

        Raises:
            ApiError: 429, a limit is reached; 400, the request alone exceeds a limit; 503, the spend has not been read.
        """
        payers: list[Payer] = [key, *self._shared.of_tags(tags)]
        endpoint = self._shared.of_endpoint()
        await self._wait_for_spend([*payers, *endpoint])
        if _has_budget(payers) and model not in self._totals.prices:
            self._unpriced_models.add(model)
        counts = self._counts[key.account]
        self._require_budgets(payers)
        # The endpoint's budget gets no reservation: its engines cost the same with or without the request.
        self._require_budgets(endpoint, is_free=True)
        limit = key.max_parallel_requests
        if limit is not None and counts.num_running >= limit:
            raise _rate_limit_error(f"this key may have {limit} concurrent requests", None)
        now = self._monotonic()
        _check_output_tokens(key, counts.output_tokens, now, output_tokens)
        _check_input_tokens(key, counts.prompt_tokens, now, prompt_tokens)
        price = self._totals.prices.get(model)
        usd = None if price is None else price.max_usd(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self._reserve(request_id, payers, usd)
        counts.prompt_tokens.reserved += prompt_tokens
        counts.output_tokens.reserved += output_tokens
        counts.num_running += 1
        permit = Permit(
            account=key.account,
            reserved_accounts=[payer.account for payer in payers],
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )
        self._permits[request_id] = permit
        return permit

    def settle(self, permit: Permit, used: ActualUsage | None) -> None:
        """Release a permit. Idempotent. If `used` is None, the request's ledger record settles the permit later."""
        self._mark_ended(permit)
        if permit.request_id not in self._permits:
            return
        if used is None:
            self._waiting[permit.request_id] = self._monotonic()
        else:
            self._settle_by_id(permit.request_id, used)

    async def catch_up(self) -> None:
        """Settle requests from new ledger records, at most once per second, and less often if nothing is waiting."""
        now = self._monotonic()
        # Poll often while requests wait for their records, or a model for its first price.
        must_poll_often = self._waiting or self._unpriced_models or now < self._started_at + _STARTUP_S
        is_polling = self._poll_task is not None and not self._poll_task.done()
        if is_polling or now < self._polled_at + (_POLL_S if must_poll_often else _IDLE_POLL_S):
            return
        self._polled_at = now
        # Shielded: the records are read only once, so a client that disconnects must not cancel the reading.
        self._poll_task = asyncio.create_task(self._settle_from_ledger(now))
        await asyncio.shield(self._poll_task)

    # --- as a follower of the ledger

    def on_attach(self, totals: Totals) -> None:
        """Do nothing: records from before the start only count toward budgets."""

    def on_ledger_record(self, request: RequestUsage) -> None:
        if request.request_id in self._permits:
            self._ledger_records.append(request)

    def _spending_limit(self, payer: Payer) -> float | None:
        return self._budgets.spending_limit(payer.account, payer.budget_usd, payer.budget_every)

    def _require_budgets(self, payers: Iterable[Payer], *, is_free: bool = False) -> None:
        for payer in payers:
            _raise_refusal(payer, self._budgets.refusal(payer.account, self._spending_limit(payer), is_free=is_free))

    def _reserve(self, request_id: str, payers: Sequence[Payer], usd: float | None) -> None:
        """Reserve the cost in every budget, or in none."""
        for index, payer in enumerate(payers):
            refusal = self._budgets.reserve_request(request_id, payer.account, self._spending_limit(payer), usd)
            if refusal:
                for reserved_payer in payers[:index]:
                    self._budgets.release_request(request_id, reserved_payer.account)
                _raise_refusal(payer, refusal)

    async def _wait_for_spend(self, payers: Sequence[Payer]) -> None:
        if self._totals.is_loaded:
            await self.catch_up()
        elif _has_budget(payers) and not await self._totals.wait_until_loaded():
            raise overloaded("the spend of this key is still being read; try again")

    async def _settle_from_ledger(self, now: float) -> None:
        await asyncio.to_thread(self._totals.catch_up)
        self._unpriced_models -= self._totals.prices.keys()
        while self._ledger_records:
            request = self._ledger_records.popleft()
            if request.request_id in self._permits:
                usage = request.usage
                used = ActualUsage(
                    prompt_tokens=usage.num_prompt_tokens, output_tokens=usage.num_output_tokens, usd=request.usd
                )
                self._settle_by_id(request.request_id, used)
        for request_id, waiting_since in list(self._waiting.items()):
            if waiting_since < now - _LEDGER_TIMEOUT_S:
                self._settle_by_id(request_id, None)  # a late record still counts as spent
        self._budgets.expire_unconfirmed(now - _LEDGER_TIMEOUT_S)

    def _mark_ended(self, permit: Permit) -> None:
        if permit.is_running:
            permit.is_running = False
            self._counts[permit.account].num_running -= 1

    def _settle_by_id(self, request_id: str, used: ActualUsage | None) -> None:
        """Replace a reservation with the usage; `used` is None if it will never be known."""
        permit = self._permits.pop(request_id)
        self._waiting.pop(request_id, None)
        self._mark_ended(permit)
        counts, now, actual = self._counts[permit.account], self._monotonic(), used or ActualUsage()
        counts.prompt_tokens.settle(now, permit.prompt_tokens, actual.prompt_tokens)
        counts.output_tokens.settle(now, permit.output_tokens, actual.output_tokens)
        for account in permit.reserved_accounts:
            if used is None:
                self._budgets.release_request(request_id, account)
            else:
                self._budgets.settle_request(request_id, account, used.usd)


def _has_budget(payers: Iterable[Payer]) -> bool:
    return any(payer.budget_usd is not None for payer in payers)


def _raise_refusal(payer: Payer, refusal: Refusal | None) -> None:
    if refusal is None:
        return
    budget = payer.describe_budget()
    if refusal == "spent":
        raise ApiError(429, f"{budget} is spent", code="insufficient_quota")
    if refusal == "reserved by a batch":
        raise _rate_limit_error(f"the rest of {budget} is reserved by a batch until it ends", _BATCH_RETRY_S)
    if refusal == "reserved by requests":
        raise _rate_limit_error(f"the rest of {budget} is reserved by running requests until they end", None)


def _check_input_tokens(key: KeyRecord, window: TokenWindow, now: float, tokens: int) -> None:
    """Refuse a prompt that might exceed the limit (429). A key's only running request may use all that is left."""
    limit = key.input_tokens_per_min
    if limit is None or window.excess(now, tokens, limit) <= 0:
        return
    counted_excess = window.counted.total - limit + 1
    if counted_excess > 0 or window.reserved:
        wait_s = window.counted.wait_s(now, counted_excess) if counted_excess > 0 else None
        raise _rate_limit_error(f"this key may have {limit} input tokens a minute", wait_s)


def _check_output_tokens(key: KeyRecord, window: TokenWindow, now: float, output_tokens: int) -> None:
    """Refuse an answer that might exceed the limit: 429, or 400 if this request by itself might exceed it."""
    limit = key.output_tokens_per_min
    if limit is None:
        return
    if output_tokens > limit:
        raise ApiError(
            400,
            f"this key may have {limit} output tokens a minute, but the request needs up to {output_tokens}",
            code="max_tokens_too_large",
            param="max_tokens",
        )
    excess = window.excess(now, output_tokens, limit)
    if excess > 0:
        wait_s = window.counted.wait_s(now, excess)
        raise _rate_limit_error(f"this key may have {limit} output tokens a minute", wait_s)


def _rate_limit_error(message: str, wait_s: float | None) -> ApiError:
    """Return a 429 error with a retry time. If `wait_s` is None, the retry time is short."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_BUSY_RETRY_S if wait_s is None else wait_s)
