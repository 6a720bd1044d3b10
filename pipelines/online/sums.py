"""Requests of a ledger added up by the minute: what `/v1/cost` and `/v1/live` are made of. It knows records alone."""

from dataclasses import dataclass

from peagle.economics.usage import RequestUsage, UnitUsage

MINUTE_S = 60


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
