"""What a key may still do: requests at once, requests and output tokens of the last minute, and its budget.

A clock is injected, and it knows neither HTTP nor where keys come from. Counts live in one process (the ingress); money
is kept by `budgets.py`.

A request counts before anything else is looked at: those that are refused, that read or that delete cost time too.
Output tokens count when they are known, and until then as many as the request may have, so that no burst of requests
overshoots the limit. A window slides: what is a minute old no longer counts.

Of a budget a request holds what it costs alone, its prompt and its output each at their price of late
(`token_price.py`), until its own cost is known. One that is alone under way gets in with whatever is left; one of a
model without a price gets in only so. So requests overspend a budget by the last one, and by what some cost beyond what
they held.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipelines.online.budgets import Budgets, Refusal
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord
from pipelines.online.token_price import TokenPrice

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
        """Seconds until `excess` of the total have expired; None if all of it would not be enough."""
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
        """Count a request, whatever becomes of it; one that is refused here does not count.

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
        """Refuse what costs nothing by itself, such as a file or an order, to a key that has spent its budget.

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
        """A request has ended with so many tokens, at that cost; a second time changes nothing.

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
