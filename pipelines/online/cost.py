"""What the endpoint delivered and what that cost: by key, by model and in all, from its ledger.

Of a request, the cost is that of its share of an engine's busy seconds. What engines cost while they loaded or idled
belongs to nobody's request; it stands in the account of the whole. It knows records and prices, no HTTP.

Requests are added up by the minute as they are read, so that memory grows with time and keys and not with requests.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.economics.cost import account
from peagle.economics.ledger import RequestReader, SessionReader
from peagle.economics.prices import Price
from peagle.economics.usage import RequestUsage, UnitUsage
from peagle.speculation import SpeculationStats

_MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class _Cell:
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


class CostView:
    """The ledger, read as it grows."""

    def __init__(self, folder: Path, price: Price, *, now: Callable[[], float] = time.time) -> None:
        self._price = price
        self._now = now
        self._requests = RequestReader(folder)
        self._sessions = SessionReader(folder)
        self._cells: dict[_Cell, Sums] = {}
        self._listeners: list[Callable[[RequestUsage], None]] = []
        self._lock = threading.Lock()

    def listen(self, hear: Callable[[RequestUsage], None]) -> None:
        """Be told of each request when it is read, so that the ledger is read once."""
        self._listeners.append(hear)

    def report(self, key: str | None = None, window_s: float | None = None) -> dict[str, Any]:
        """Figures ready for JSON.

        Args:
            key: only this one's requests, and nothing of the whole; None is everybody's.
            window_s: only the last so many seconds, to the minute; None is all time.

        Raises:
            PeagleError: the ledger cannot be read.
        """
        with self._lock:
            for request in self._requests.each():
                self._add(request)
            return self._report(key, window_s)

    def spent_usd(self, key: str) -> float:
        """What this key has spent in all.

        Raises:
            PeagleError: the ledger cannot be read.
        """
        usd: float = self.report(key)["total"]["usd"]
        return usd

    def _report(self, key: str | None, window_s: float | None) -> dict[str, Any]:
        since = (self._now() - window_s) if window_s is not None else 0.0
        chosen = {
            cell: sums
            for cell, sums in self._cells.items()
            if cell.minute >= since // _MINUTE_S and key in (None, cell.key)
        }
        report: dict[str, Any] = {
            "window_s": window_s,
            "total": totals(chosen.values()),
            "by_model": _grouped(chosen, lambda cell: cell.model),
        }
        if key is not None:
            return report
        units = [sums.usage for sums in chosen.values()]
        return report | {
            "by_key": _grouped(chosen, lambda cell: cell.key),
            "account": self._account(units, window_s, since),
        }

    def _add(self, request: RequestUsage) -> None:
        minute = int(request.usage.finished_at // _MINUTE_S)
        cell = _Cell(minute, request.usage.session_id, request.key, request.model)
        self._cells.setdefault(cell, Sums(request.usage)).add(request)
        for hear in self._listeners:
            hear(request)

    def _account(self, units: list[UnitUsage], window_s: float | None, since: float) -> dict[str, object]:
        """With the minute that the window begins in, as the requests have it."""
        begin = since // _MINUTE_S * _MINUTE_S
        sessions = self._sessions.all() if window_s is None else self._sessions.since(begin)
        known = {session.session_id for session in sessions}
        return account((unit for unit in units if unit.session_id in known), sessions, self._price).to_dict()


def totals(cells: Iterable[Sums]) -> dict[str, Any]:
    """Sums over requests. Tokens per dollar are of busy time: no request pays for an idle engine.

    All requests' time over all their shares of the busy time is how many there were at once. Of one key's it is that
    only where nobody's had several choices, as these count in the shares. A batch has engines of its own and is left
    out there.
    """
    cells = list(cells)
    units = [sums.usage for sums in cells]
    tokens, usd = sum(unit.num_output_tokens for unit in units), sum(sums.usd for sums in cells)
    shares_s = sum(sums.shares_s for sums in cells)
    drafts = sum((unit.speculation for unit in units), SpeculationStats.empty())
    return {
        "num_requests": sum(sums.num_requests for sums in cells),
        "num_cut": sum(sums.num_cut for sums in cells),
        "num_failed": sum(unit.num_failed_rows for unit in units),
        "num_prompt_tokens": sum(unit.num_prompt_tokens for unit in units),
        "num_cached_tokens": sum(unit.num_cached_tokens for unit in units),
        "num_output_tokens": tokens,
        "requests_at_once": sum(sums.request_s for sums in cells) / shares_s if shares_s else None,
        "num_drafts": drafts.num_drafts,
        "num_draft_tokens": drafts.num_draft_tokens,
        "num_accepted_tokens": drafts.num_accepted_tokens,
        "acceptance_length": drafts.acceptance_length,
        "acceptance_rates": list(drafts.acceptance_rates),
        "usd": usd,
        "tokens_per_busy_usd": tokens / usd if usd and tokens else None,
        "busy_usd_per_million_tokens": 1e6 * usd / tokens if usd and tokens else None,
    }


def _grouped(cells: dict[_Cell, Sums], name_of: Callable[[_Cell], str]) -> dict[str, Any]:
    groups: defaultdict[str, list[Sums]] = defaultdict(list)
    for cell, sums in cells.items():
        groups[name_of(cell)].append(sums)
    return {name: totals(group) for name, group in sorted(groups.items())}
