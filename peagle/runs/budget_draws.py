"""The tag budgets that a bulk run shares with an endpoint, through the endpoint's ledger.

The endpoint need not be running. The run and the endpoint read each other's spending every few seconds, so together
they can exceed a budget by what they spend between two reads.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

from peagle.economics.report.figures import format_usd
from peagle.economics.request_work import RequestTotalsReader
from peagle.economics.shared_budgets import (
    BUDGETS_NAME,
    SharedBudget,
    TagSpending,
    UsdByDay,
    period_of,
    read_budgets,
    read_tag_spending,
    sum_tag_spending,
    tag_accounts,
    write_tag_spending,
)
from peagle.economics.spending import day_number, today
from peagle.errors import ConfigError, PeagleError

_POLL_S = 5.0
_log = logging.getLogger(__name__)


class TagBudgets:
    """The budgets of a run's tags in an endpoint's ledger.

    `run` (an id) and `tags` (JSON) are the same for all attempts of the run. Raises ConfigError if there is no ledger.
    """

    def __init__(
        self,
        ledger: Path,
        run: str,
        tags: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        day: Callable[[], date] = today,
    ) -> None:
        if not ledger.is_dir():
            raise ConfigError(
                f"--draw-on {ledger.parent}: no ledger found", hint="use the --state folder of `peagle serve`"
            )
        self._ledger, self._monotonic, self._day = ledger, monotonic, day
        earlier_attempts = (spending for spending in read_tag_spending(ledger) if spending.run == run)
        self._spending = replace(next(earlier_attempts, TagSpending(run=run, tags=tags)), tags=tags)
        self._accounts = set(tag_accounts(tags))
        self._reader = RequestTotalsReader(ledger)
        self._spent_by_requests: UsdByDay = {account: defaultdict(float) for account in self._accounts}
        self._spent_by_other_runs: UsdByDay = {}
        self._held_by_other_runs: dict[str, float] = {}
        self._budgets: list[SharedBudget] = []
        self._polled_at = -math.inf

    def reached(self, spent_usd: float, reserve_usd: float) -> str | None:
        """Return a message about the budget that stops the run, or None.

        `reserve_usd` is the maximum cost of shutting the run down. Raises OSError or PeagleError if the first call
        cannot read the ledger; later failures are logged.
        """
        now = self._monotonic()
        if now >= self._polled_at + _POLL_S:
            try:
                self._refresh(spent_usd, reserve_usd)
            except (OSError, PeagleError) as error:
                if self._polled_at == -math.inf:
                    raise
                _log.warning("cannot read the budgets at %s: %s", self._ledger, error)
            self._polled_at = now
        return next(filter(None, (self._message_if_reached(budget, reserve_usd) for budget in self._budgets)), None)

    def end(self, spent_usd: float) -> None:
        """Write the final cost of the run, without a reservation; raises OSError if it cannot be written."""
        self._write_spending(spent_usd, held_usd=0.0)

    def _refresh(self, spent_usd: float, reserve_usd: float) -> None:
        self._write_spending(spent_usd, held_usd=reserve_usd)
        for group, work in self._reader.new():
            for account in self._accounts.intersection(tag_accounts(group.tags)):
                self._spent_by_requests[account][group.day] += work.usd
        self._spent_by_other_runs, self._held_by_other_runs = sum_tag_spending(
            spending for spending in read_tag_spending(self._ledger) if spending.run != self._spending.run
        )
        budgets = read_budgets(self._ledger / BUDGETS_NAME)
        self._budgets = [budget for budget in budgets if budget.account in self._accounts]

    def _write_spending(self, spent_usd: float, held_usd: float) -> None:
        """Write the cost of the run; new cost counts for the current day."""
        days = dict(self._spending.usd_by_day)
        day = day_number(self._day())
        days[day] = days.get(day, 0.0) + max(0.0, spent_usd - sum(days.values()))
        self._spending = replace(self._spending, usd_by_day=days, held_usd=held_usd, at=time.time())
        write_tag_spending(self._ledger, self._spending)

    def _message_if_reached(self, budget: SharedBudget, reserve_usd: float) -> str | None:
        period = period_of(budget.budget_every, self._day()) if budget.budget_every else None
        first_day = day_number(period[0]) if period else -math.inf
        spending_by_day = (
            self._spent_by_requests[budget.account],
            self._spent_by_other_runs.get(budget.account, {}),
            self._spending.usd_by_day,
        )
        spent_usd = sum(usd for days in spending_by_day for day, usd in days.items() if day >= first_day)
        left_usd = budget.budget_usd - spent_usd - self._held_by_other_runs.get(budget.account, 0.0)
        if left_usd > reserve_usd:
            return None
        reset = f"; the budget resets on {period[1]}" if period else ""
        return (
            f"{budget.describe_budget()} is reached: {format_usd(max(0.0, left_usd))} left, and shutting the run "
            f"down may cost {format_usd(reserve_usd)}{reset}"
        )
