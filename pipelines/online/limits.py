"""What a key may still do: requests and output tokens of the last minute, and its budget.

Pure: a clock is injected, and it knows neither HTTP nor where keys come from. Counts live in one process (the ingress);
the money that was spent comes from the ledger when that process starts.

Output tokens count when they are known, and until then as many as the request may have, so that no burst of requests
overshoots the limit. A window slides: what is a minute old no longer counts.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord

WINDOW_S = 60.0
_BUSY_RETRY_S = 1.0  # when only the end of requests under way can make room


@dataclass(slots=True)
class Permit:
    """An admitted request; give it back with `Limiter.settle` when it has ended."""

    key: str
    reserved_tokens: int
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
    tokens: _Window = field(default_factory=_Window)
    reserved_tokens: int = 0
    spent_usd: float = 0.0


class Limiter:
    """Counts by key.

    Args:
        spent_usd: by key, what the ledger says it has spent so far.
        monotonic: seconds; only differences matter.
    """

    def __init__(
        self, spent_usd: Mapping[str, float] | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._usage = {name: _Usage(spent_usd=usd) for name, usd in (spent_usd or {}).items()}

    def admit(self, key: KeyRecord, output_tokens: int) -> Permit:
        """Let a request in that may have so many output tokens.

        Raises:
            ApiError: 429, with the time after which another attempt makes sense.
        """
        now, usage = self._monotonic(), self._usage.setdefault(key.name, _Usage())
        usage.requests.expire(now)
        usage.tokens.expire(now)
        self._check_budget(key, usage)
        self._check_requests(key, usage, now)
        self._check_tokens(key, usage, now, output_tokens)
        usage.requests.add(now, 1)
        usage.reserved_tokens += output_tokens
        return Permit(key=key.name, reserved_tokens=output_tokens)

    def settle(self, permit: Permit, *, output_tokens: int, usd: float) -> None:
        """A request has ended with so many tokens, at that cost; a second time changes nothing."""
        if permit.is_settled:
            return
        permit.is_settled = True
        usage = self._usage[permit.key]
        usage.reserved_tokens -= permit.reserved_tokens
        usage.spent_usd += usd
        if output_tokens:
            usage.tokens.add(self._monotonic(), output_tokens)

    def charge(self, key: str, usd: float) -> None:
        """Something was spent that was no request here."""
        self._usage.setdefault(key, _Usage()).spent_usd += usd

    def _check_budget(self, key: KeyRecord, usage: _Usage) -> None:
        if key.budget_usd is not None and usage.spent_usd >= key.budget_usd:
            raise ApiError(429, f"the budget of ${key.budget_usd:g} of this key is spent", code="insufficient_quota")

    def _check_requests(self, key: KeyRecord, usage: _Usage, now: float) -> None:
        limit = key.requests_per_min
        if limit is not None and usage.requests.total >= limit:
            wait_s = usage.requests.wait_s(now, usage.requests.total - limit + 1)
            raise _too_many(f"this key may make {limit} requests a minute", wait_s)

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
