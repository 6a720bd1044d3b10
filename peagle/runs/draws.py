"""A bulk run's draw on the budgets of its tags, which it shares with an endpoint.

The run writes into the endpoint's ledger what it has cost and what its end may cost, and reads there what everybody
else with its tags has. Nobody is asked, so the endpoint need not be up. Each looks every few seconds: together they
overspend a budget by what they spend between two looks.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

from peagle.economics.request_work import WorkReader
from peagle.economics.shared_budgets import (
    BUDGETS_NAME,
    ByDay,
    Draw,
    SharedBudget,
    drawn,
    period_of,
    read_budgets,
    read_draws,
    tag_accounts,
    write_draw,
)
from peagle.economics.spending import day_number, today
from peagle.errors import ConfigError, PeagleError
from peagle.runs.limits import dollars

_EVERY_S = 5.0
_log = logging.getLogger(__name__)


class TagDraw:
    """One run's draw.

    Args:
        ledger: of the endpoint.
        run: id of the run, the same for all its attempts.
        tags: of the run, as a record has them.
        day: the UTC day of now.

    Raises:
        ConfigError: there is no such ledger.
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
                f"--draw-on {ledger.parent}: there is no ledger", hint="name the --state folder of `peagle serve`"
            )
        self._ledger, self._monotonic, self._day = ledger, monotonic, day
        self._own = next((one for one in read_draws(ledger) if one.run == run), Draw(run=run, tags=tags))
        self._own = replace(self._own, tags=tags)
        self._accounts = set(tag_accounts(tags))
        self._reader = WorkReader(ledger)
        self._requests: ByDay = {account: defaultdict(float) for account in self._accounts}
        self._runs: ByDay = {}
        self._held: dict[str, float] = {}
        self._budgets: list[SharedBudget] = []
        self._looked_at = -math.inf

    def reached(self, spent_usd: float, reserve_usd: float) -> str | None:
        """The budget that stops the run, in words; None while it may go on.

        Args:
            spent_usd: by the run, all attempts.
            reserve_usd: what its end may cost.

        Raises:
            OSError, PeagleError: the ledger cannot be read or written; later only logged.
        """
        now = self._monotonic()
        if now >= self._looked_at + _EVERY_S:
            try:
                self._look(spent_usd, reserve_usd)
            except (OSError, PeagleError) as error:
                if self._looked_at == -math.inf:
                    raise
                _log.warning("the budgets at %s are not seen now: %s", self._ledger, error)
            self._looked_at = now
        return next(filter(None, (self._judge(budget, reserve_usd) for budget in self._budgets)), None)

    def end(self, spent_usd: float) -> None:
        """Write what the run has cost at its end; it holds nothing any more.

        Raises:
            OSError: it cannot be written.
        """
        self._tell(spent_usd, 0.0)

    def _look(self, spent_usd: float, held_usd: float) -> None:
        self._tell(spent_usd, held_usd)
        for whose, work in self._reader.new():
            for account in self._accounts.intersection(tag_accounts(whose.tags)):
                self._requests[account][whose.day] += work.usd
        self._runs, self._held = drawn(draw for draw in read_draws(self._ledger) if draw.run != self._own.run)
        budgets = read_budgets(self._ledger / BUDGETS_NAME)
        self._budgets = [budget for budget in budgets if budget.account in self._accounts]

    def _tell(self, spent_usd: float, held_usd: float) -> None:
        """Write what the run has cost; the part that is new counts on this day."""
        days = dict(self._own.usd_by_day)
        day = day_number(self._day())
        days[day] = days.get(day, 0.0) + max(0.0, spent_usd - sum(days.values()))
        self._own = replace(self._own, usd_by_day=days, held_usd=held_usd, at=time.time())
        write_draw(self._ledger, self._own)

    def _judge(self, budget: SharedBudget, reserve_usd: float) -> str | None:
        period = period_of(budget.budget_every, self._day()) if budget.budget_every else None
        first = day_number(period[0]) if period else -math.inf
        spent = (self._requests[budget.account], self._runs.get(budget.account, {}), self._own.usd_by_day)
        spent_usd = sum(usd for days in spent for day, usd in days.items() if day >= first)
        left_usd = budget.budget_usd - spent_usd - self._held.get(budget.account, 0.0)
        if left_usd > reserve_usd:
            return None
        again = f"; it resets on {period[1]}" if period else ""
        return (
            f"{budget.describe_budget()} is reached: {dollars(max(0.0, left_usd))} are left, and ending may cost "
            f"{dollars(reserve_usd)}{again}"
        )
