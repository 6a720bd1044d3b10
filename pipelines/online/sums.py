"""Requests of a ledger added up by the minute, and long ago by the hour and the day: what `/v1/cost` is made of.

It knows records alone. So a year of twenty keys is some tens of thousands of sums, however many requests it had.
"""

from dataclasses import dataclass, replace

from peagle.economics.usage import RequestUsage, UnitUsage

MINUTE_S = 60
_HOUR, _DAY = 60, 1440  # minutes
_BY_THE_HOUR_AFTER, _BY_THE_DAY_AFTER = 2 * _DAY, 60 * _DAY


@dataclass(frozen=True, slots=True)
class Cell:
    """Which requests were added up."""

    minute: int
    session_id: str
    key: str
    model: str


@dataclass(slots=True)
class Sums:
    """Requests of one engine process together."""

    usage: UnitUsage
    num_requests: int = 0
    num_cut: int = 0
    usd: float = 0.0
    request_s: float = 0.0
    shares_s: float = 0.0

    def add(self, request: RequestUsage) -> None:
        """One more; the first only counts, since `usage` began with it."""
        if not request.is_batch:
            self.request_s += request.usage.finished_at - request.usage.started_at
            self.shares_s += request.usage.busy_s
        self.usage = self.usage + request.usage if self.num_requests else request.usage
        self.num_requests += request.usage.num_rows + request.usage.num_failed_rows  # one, but of a batch
        self.num_cut += request.outcome == "cut"
        self.usd += request.usd

    def merge(self, other: "Sums") -> None:
        """Those of `other` too, which are of the same process."""
        self.usage = self.usage + other.usage
        self.num_requests += other.num_requests
        self.num_cut += other.num_cut
        self.usd += other.usd
        self.request_s += other.request_s
        self.shares_s += other.shares_s


def coarse(minute: int, now: int) -> int:
    """The minute under which one is kept that is as long ago as that.

    >>> coarse(100_000, 100_001), coarse(100_000, 103_000), coarse(100_000, 200_000)
    (100000, 99960, 99360)
    """
    age = now - minute
    if age < _BY_THE_HOUR_AFTER:
        return minute
    step = _HOUR if age < _BY_THE_DAY_AFTER else _DAY
    return minute // step * step


def merged(cells: dict[Cell, Sums], now: int) -> dict[Cell, Sums]:
    """The same sums, fewer where they are long ago."""
    kept: dict[Cell, Sums] = {}
    for cell, sums in cells.items():
        minute = coarse(cell.minute, now)
        cell = cell if minute == cell.minute else replace(cell, minute=minute)
        if there := kept.get(cell):
            there.merge(sums)
        else:
            kept[cell] = sums
    return kept
