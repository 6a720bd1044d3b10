"""What a key may still do: requests and output tokens of the last minute, and its budget.

Pure: a clock is injected, and it knows neither HTTP nor where keys come from. Counts live in one process (the ingress);
the money that was spent comes from the ledger when that process starts, that of batches from `budgets.py`.

A request counts before anything else is looked at: those that are refused, that read or that delete cost time too.
Output tokens count when they are known, and until then as many as the request may have, so that no burst of requests
overshoots the limit. A window slides: what is a minute old no longer counts.

Of a budget a request holds those tokens at what a token of its model has cost of late, until its own cost is known. One
that is alone under way gets in with whatever is left. So requests overspend a budget by the last one, and by what some
cost beyond what they held.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelines.online.budgets import Budgets
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord

WINDOW_S = 60.0
POLLS_PER_MIN = 60  # of a key that has a limit of requests: two pages, each of which asks every two seconds
_BUSY_RETRY_S = 1.0  # when only the end of requests under way can make room
_BATCH_RETRY_S = 60.0  # or that of a batch
_PRICE_KEPT = 0.98  # of what is known of a model's price, with each request: the last fifty make most of it


@dataclass(slots=True)
class Permit:
    """An admitted request; give it back with `Limiter.settle` when it has ended."""

    key: str
    reserved_tokens: int
    model: str | None = None
    held_usd: float = 0.0
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
        """Seconds until `excess` of the total have expired; None if all of it would not be enough."""
        for at, amount in self.entries:
            excess -= amount
            if excess <= 0:
                return at + WINDOW_S - now
        return None


@dataclass(slots=True)
class _Price:
    """What an output token of a model costs, the newest requests counting most."""

    usd: float = 0.0
    tokens: float = 0.0

    def learn(self, usd: float, tokens: int) -> None:
        self.usd = self.usd * _PRICE_KEPT + usd
        self.tokens = self.tokens * _PRICE_KEPT + tokens

    @property
    def usd_per_token(self) -> float:
        return self.usd / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class _Usage:
    requests: _Window = field(default_factory=_Window)
    polls: _Window = field(default_factory=_Window)
    tokens: _Window = field(default_factory=_Window)
    reserved_tokens: int = 0
    num_under_way: int = 0
    held_usd: float = 0.0
    spent_usd: float = 0.0


class Limiter:
    """Counts by key.

    Args:
        budgets: what batches hold and have spent; told what requests hold.
        monotonic: seconds; only differences matter.
    """

    def __init__(
        self,
        *,
        budgets: Budgets | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._budgets = budgets or Budgets()
        self._prices: defaultdict[str | None, _Price] = defaultdict(_Price)
        self._usage: defaultdict[str, _Usage] = defaultdict(_Usage)

    def count(self, key: KeyRecord, *, is_poll: bool = False) -> None:
        """Count a request, whatever becomes of it; one that is refused here does not count.

        Args:
            is_poll: it counts in a window of its own, as the page asks for figures every two seconds.

        Raises:
            ApiError: 429, with the time after which another attempt makes sense.
        """
        if key.requests_per_min is None:
            return
        usage = self._usage[key.name]
        window, limit = (usage.polls, POLLS_PER_MIN) if is_poll else (usage.requests, key.requests_per_min)
        now = self._monotonic()
        window.expire(now)
        if window.total >= limit:
            wait_s = window.wait_s(now, window.total - limit + 1)
            what = "requests for live figures" if is_poll else "requests"
            raise _too_many(f"this key may make {limit} {what} a minute", wait_s)
        window.add(now, 1)

    def admit(self, key: KeyRecord, output_tokens: int, model: str | None = None) -> Permit:
        """Let a request in that may have so many output tokens of this model.

        Raises:
            ApiError: 429, with the time after which another attempt makes sense.
        """
        now, usage = self._monotonic(), self._usage[key.name]
        usage.tokens.expire(now)
        held_usd = output_tokens * self._prices[model].usd_per_token
        self._check_budget(key, usage, output_tokens, held_usd)
        self._check_tokens(key, usage, now, output_tokens)
        usage.reserved_tokens += output_tokens
        usage.num_under_way += 1
        self._hold(key.name, usage, held_usd)
        return Permit(key=key.name, reserved_tokens=output_tokens, model=model, held_usd=held_usd)

    def settle(self, permit: Permit, *, output_tokens: int, usd: float) -> None:
        """A request has ended with so many tokens, at that cost; a second time changes nothing."""
        if permit.is_settled:
            return
        permit.is_settled = True
        usage = self._usage[permit.key]
        usage.reserved_tokens -= permit.reserved_tokens
        usage.num_under_way -= 1
        self._hold(permit.key, usage, -permit.held_usd)
        self.spend(permit.key, permit.model, output_tokens=output_tokens, usd=usd)
        if output_tokens:
            usage.tokens.add(self._monotonic(), output_tokens)

    def spend(self, key: str, model: str | None, *, output_tokens: int, usd: float) -> None:
        """A request has cost as much, now or before this process was there."""
        self._usage[key].spent_usd += usd
        if output_tokens:
            self._prices[model].learn(usd, output_tokens)

    def _hold(self, key: str, usage: _Usage, usd: float) -> None:
        usage.held_usd += usd
        self._budgets.hold_request(key, usd)

    def _check_budget(self, key: KeyRecord, usage: _Usage, output_tokens: int, usd: float) -> None:
        if key.budget_usd is None:
            return
        left_usd = key.budget_usd - usage.spent_usd - self._budgets.spent_by_batches(key.name)
        if left_usd <= 0:
            raise ApiError(429, f"the budget of ${key.budget_usd:g} of this key is spent", code="insufficient_quota")
        if not output_tokens:
            return  # a file or an order costs nothing
        left_usd -= self._budgets.held_by_batches(key.name)
        whose = f"what is left of the budget of ${key.budget_usd:g} of this key"
        if left_usd <= 0:
            raise _too_many(f"{whose} is held by its batch until that has ended", _BATCH_RETRY_S)
        if usage.num_under_way and usage.held_usd + usd > left_usd:
            raise _too_many(f"{whose} is held by its requests under way until they have ended", None)

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


def _too_many(message: str, wait_s: float | None) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_BUSY_RETRY_S if wait_s is None else wait_s)
