"""Amounts of the last minute, as a window that slides."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0


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
