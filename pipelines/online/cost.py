"""Usage and cost of the endpoint from its ledger: by key, by model and in total.

A request costs its share of an engine's busy time. Starting and idle time is not billed to requests; it only counts in
the cost of the whole endpoint.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from peagle.economics.account import account
from peagle.economics.ledger import SessionReader
from peagle.economics.prices import Price
from peagle.economics.report.figures import cost_notes
from peagle.economics.spending import Days, Ledger, SpendingGroup, charges, day_number, day_of
from peagle.economics.statement import parse_dimensions, statement
from peagle.economics.usage import Work
from peagle.engine.self_check import count_outcomes
from peagle.errors import ConfigError
from peagle.speculation import SpeculationStats
from pipelines.online.errors import ApiError, overloaded
from pipelines.online.gateway.budget_watch import budget_status
from pipelines.online.gateway.keys import Payer
from pipelines.online.totals import MINUTE_S, RequestGroup, Sums, coarsen, totals_of


class CostView:
    """Reports of usage and cost from a ledger to which engines add records."""

    def __init__(self, folder: Path, price: Price, *, now: Callable[[], float] = time.time) -> None:
        self._price = price
        self._now = now
        self._sessions = SessionReader(folder)
        self.totals = totals_of(folder)

    def report(self, key: str | None = None, window_s: float | None = None) -> dict[str, Any]:
        """Return usage and cost as JSON, for all time or for the last `window_s` seconds.

        The start of the window is rounded to a minute, or to an hour or a day if it is long ago. With a key, the report
        covers only the key's requests, and omits the costs of the engines (`account`).
        """
        with self.totals.snapshot():
            return self._report(key, window_s)

    def spent_usd(self, account: str) -> float | None:
        """Return the total spend of an account, or None while the ledger is read for the first time."""
        if not self.totals.is_loaded:
            self.totals.read_in_background()
            return None
        self.totals.catch_up()
        return self.totals.budgets.spent_usd(account)

    def budgets(self, payers: Iterable[Payer]) -> dict[str, Any]:
        with self.totals.snapshot():
            budgets = self.totals.budgets
            return {payer.name: budget_status(payer, budgets) for payer in payers if payer.budget_usd is not None}

    def statement(self, by: Sequence[str], days: Days, key: str | None = None) -> dict[str, Any]:
        """Return the spend in `days` as JSON, like `peagle cost`. With a key, include only what that key was billed."""
        work: defaultdict[SpendingGroup, Work] = defaultdict(Work)
        with self.totals.snapshot():
            for requests, sums in self.totals.cells.items():
                day = day_of(requests.minute * MINUTE_S)
                group = SpendingGroup(
                    day, requests.session_id, requests.key, requests.model, requests.drafter, requests.tags
                )
                work[group] += Work.of(sums.usage, sums.usd, request_s=sums.request_s)
            ledger = Ledger(
                run="endpoint", sessions=self._sessions.all(), work=work, session_at=self._sessions.session_at
            )
        charged = charges(ledger, days)
        chosen = (charge for charge in charged if key in (None, charge.key))
        return statement(chosen, by, days, cost_notes(ledger.sessions))

    async def require_loaded(self) -> None:
        """Wait briefly for the first read of the ledger; raise 503 if it takes longer."""
        if not await self.totals.wait_until_loaded():
            raise overloaded("the ledger is being read; try again")

    def _report(self, key: str | None, window_s: float | None) -> dict[str, Any]:
        since_minute: float = -math.inf
        if window_s is not None:  # the first minute of the window, rounded to an hour or a day if it is long ago
            now = self._now()
            first_minute = math.floor(max(now - window_s, 0.0) / MINUTE_S)
            since_minute = coarsen(first_minute, math.floor(now / MINUTE_S))
        chosen = {
            requests: sums
            for requests, sums in self.totals.cells.items()
            if requests.minute >= since_minute and key in (None, requests.key)
        }
        report: dict[str, Any] = {
            "window_s": window_s,
            "total": request_totals(chosen.values()),
            "by_model": _grouped(chosen, lambda requests: requests.model),
        }
        if key is not None:
            return report
        sessions = self._sessions.all() if window_s is None else self._sessions.since(since_minute * MINUTE_S)
        session_ids = {session.session_id for session in sessions}
        usages = (sums.usage for sums in chosen.values() if sums.usage.session_id in session_ids)
        return report | {
            "by_key": _grouped(chosen, lambda requests: requests.key),
            "account": account(usages, sessions, self._price).to_dict(),
            "self_checks": count_outcomes(session.self_check for session in sessions),
        }


def requested_period(
    start: date | None, end: date | None, by: str | None, window_s: float | None
) -> tuple[tuple[str, ...], Days]:
    """Return the requested dimensions and days, or raise 400."""
    if window_s is not None:
        raise ApiError(400, "window_s cannot be combined with start, end or by", code="invalid_value", param="window_s")
    try:
        days = Days(None if start is None else day_number(start), None if end is None else day_number(end))
    except ValueError as error:
        raise ApiError(400, f"end: {error}", code="invalid_value", param="end") from error
    try:
        return parse_dimensions(by or ""), days
    except ConfigError as error:
        raise ApiError(400, f"by: {error.message}; {error.hint}", code="invalid_value", param="by") from error


def request_totals(sums_of_groups: Iterable[Sums]) -> dict[str, Any]:
    """Return the sums over requests.

    Tokens per dollar use busy time only: requests do not pay for idle engines.

    `requests_at_once` is the average concurrency: the total duration of the requests, divided by their total share of
    the engines' busy time. A request with several choices has a share for each, so the figure for a single key is exact
    only if every request had one choice. Batches with their own engines are excluded.
    """
    groups = list(sums_of_groups)
    usages = [sums.usage for sums in groups]
    tokens, usd = sum(usage.num_output_tokens for usage in usages), sum(sums.usd for sums in groups)
    shares_s = sum(sums.shares_s for sums in groups)
    stats = sum((usage.speculation for usage in usages), SpeculationStats.empty())
    return {
        "num_requests": sum(sums.num_requests for sums in groups),
        "num_cut": sum(sums.num_cut for sums in groups),
        "num_failed": sum(usage.num_failed_rows for usage in usages),
        "num_prompt_tokens": sum(usage.num_prompt_tokens for usage in usages),
        "num_cached_tokens": sum(usage.num_cached_tokens for usage in usages),
        "num_output_tokens": tokens,
        "requests_at_once": sum(sums.request_s for sums in groups) / shares_s if shares_s else None,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_lookup_tokens": stats.num_lookup_tokens,
        "num_dropped_tokens": stats.num_dropped_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rates": list(stats.acceptance_rates),
        "usd": usd,
        "tokens_per_busy_usd": tokens / usd if usd and tokens else None,
        "busy_usd_per_million_tokens": 1e6 * usd / tokens if usd and tokens else None,
    }


def _grouped(cells: dict[RequestGroup, Sums], name_of: Callable[[RequestGroup], str]) -> dict[str, Any]:
    groups: defaultdict[str, list[Sums]] = defaultdict(list)
    for requests, sums in cells.items():
        groups[name_of(requests)].append(sums)
    return {name: request_totals(group) for name, group in sorted(groups.items())}
