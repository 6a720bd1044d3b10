"""Amounts of the last minute, as a window that slides, and refusals of more."""

from collections import deque
from dataclasses import dataclass, field

from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import KeyRecord

WINDOW_S = 60.0
_BUSY_RETRY_S = 1.0  # when only the end of requests under way can make room


@dataclass(slots=True)
class MinuteWindow:
    """Amounts of the last minute."""

    entries: deque[tuple[float, int]] = field(default_factory=deque)
    total: int = 0

    def add(self, now: float, amount: int) -> None:
        """Count an amount for a minute from now on."""
        self.entries.append((now, amount))
        self.total += amount

    def expire(self, now: float) -> None:
        """Forget what is a minute old."""
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
class TokenWindow:
    """Tokens of the last minute.

    Attributes:
        known: of requests that have ended.
        reserved: the most that requests under way may have.
    """

    known: MinuteWindow = field(default_factory=MinuteWindow)
    reserved: int = 0

    def excess(self, now: float, tokens: int, limit: int) -> int:
        """Tokens beyond a limit, if so many more were reserved; 0 and less are within it."""
        self.known.expire(now)
        return self.known.total + self.reserved + tokens - limit

    def settle(self, now: float, reserved: int, used: int) -> None:
        """Count what a request used, in place of what it reserved."""
        self.reserved -= reserved
        if used:
            self.known.add(now, used)


def check_input(key: KeyRecord, window: TokenWindow, now: float, tokens: int) -> None:
    """Refuse a prompt that may exceed the minute's tokens.

    One that is alone under way gets in while the minute has any left.

    Raises:
        ApiError: 429, with the time after which another attempt makes sense.
    """
    limit = key.input_tokens_per_min
    if limit is None or window.excess(now, tokens, limit) <= 0:
        return
    over = window.known.total - limit + 1
    if over > 0 or window.reserved:
        wait_s = window.known.wait_s(now, over) if over > 0 else None
        raise too_many(f"this key may have {limit} input tokens a minute", wait_s)


def check_output(key: KeyRecord, window: TokenWindow, now: float, output_tokens: int) -> None:
    """Refuse an answer that may exceed the minute's tokens.

    Raises:
        ApiError: 429, likewise; 400, no minute ever has.
    """
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
    excess = window.excess(now, output_tokens, limit)
    if excess > 0:
        wait_s = window.known.wait_s(now, excess)
        raise too_many(f"this key may have {limit} output tokens a minute", wait_s)


def too_many(message: str, wait_s: float | None) -> ApiError:
    """The refusal of a request that may come again after so long; None is soon."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_BUSY_RETRY_S if wait_s is None else wait_s)
