"""The state of all budgets, and a warning at 50, 80 and 100 % of each.

It looks now and then and refuses nothing; that is `limits.py`. For budgets of tags and of the endpoint it adds what is
in no request: engines' seconds, and what bulk runs draw. It knows neither HTTP nor Ray.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from peagle.economics.ledger import SessionReader
from peagle.economics.shared_budgets import (
    ENDPOINT,
    ENDPOINT_ACCOUNT,
    SharedBudget,
    drawn,
    engines_usd,
    period_of,
    read_draws,
)
from peagle.economics.spending import today
from pipelines.online.budgets import Budgets
from pipelines.online.gateway.keys import KeyRecord, KeyRing
from pipelines.online.gateway.shared import Payer, SharedBudgets
from pipelines.online.totals import Totals

LEVELS = (0.5, 0.8, 1.0)
_EVERY_S = 15.0
_log = logging.getLogger("ray.serve")


def budget_of(payer: Payer, budgets: Budgets) -> dict[str, Any]:
    """The dollars that are spent of an account, in its budget's period if it has one.

    Returns:
        `spent_usd`; with a budget also `left_usd`, `used` (its share, 1.0 where nothing is left) and `alert` (the
        highest of `LEVELS` that is reached; None below them); with a period `reset`, the first day of the next one.
    """
    spent_usd = budgets.spent_usd(payer.account)
    if payer.budget_usd is None:
        return {"spent_usd": round(spent_usd, 6)}
    allowed_usd = budgets.allowed_usd(payer.account, payer.budget_usd, payer.budget_every) or 0.0
    in_period_usd = spent_usd - (allowed_usd - payer.budget_usd)
    used = in_period_usd / payer.budget_usd
    state: dict[str, Any] = {
        "spent_usd": round(in_period_usd, 6),
        "left_usd": round(max(0.0, allowed_usd - spent_usd), 6),
        "used": round(used, 4),
        "alert": max((level for level in LEVELS if used >= level), default=None),
    }
    if payer.budget_every is not None:
        state["reset"] = period_of(payer.budget_every, today())[1].isoformat()
    return state


def look_elsewhere(totals: Totals, sessions: SessionReader) -> None:
    """Tell a ledger's budgets what engines cost, and what bulk runs draw and hold.

    Raises:
        OSError, PeagleError: a file cannot be read.
    """
    spent, held = drawn(read_draws(totals.folder))
    totals.budgets.know_elsewhere({**spent, ENDPOINT_ACCOUNT: engines_usd(sessions.all())}, held)


class BudgetWatch:
    """The watch over all budgets of an endpoint.

    Args:
        ring: None without keys.
        tell: told the share of each budget that is used, with each look, by the key's name, the tag or "*" for the
            endpoint.
    """

    def __init__(
        self,
        ring: KeyRing | None,
        shared: SharedBudgets,
        totals: Totals,
        *,
        tell: Callable[[str, float], None],
    ) -> None:
        self._ring, self._shared, self._totals, self._tell = ring, shared, totals, tell
        self._sessions = SessionReader(totals.folder)
        self._said: dict[str, tuple[float, Any]] = {}  # by account: the highest level, and the budget's period

    def keep_looking(self) -> None:
        """Look as long as this process lives."""
        while True:
            try:
                self.look()
            except Exception:  # the ledger, the keys or the budgets cannot be read now; the thread must not end
                _log.exception("budgets are not watched now")
            time.sleep(_EVERY_S)

    def look(self) -> None:
        """Say of each budget the highest level that it has reached, once in its period."""
        keys, shared = self._ring.all() if self._ring else (), self._shared.all()
        if shared:
            look_elsewhere(self._totals, self._sessions)
        self._totals.catch_up()
        payers: list[Payer] = [*_with_budgets(keys), *shared]
        for payer in payers:
            state = budget_of(payer, self._totals.budgets)
            self._tell(payer.account if isinstance(payer, SharedBudget) else payer.name, state["used"])
            level, period = state["alert"], (payer.budget_usd, state.get("reset"))
            said, said_of = self._said.get(payer.account, (0.0, None))
            if level is None or (said_of == period and level <= said):
                continue
            self._said[payer.account] = level, period
            every = f" a {payer.budget_every}" if payer.budget_every else ""
            _log.warning(
                "%s has spent %.0f %% of its budget of $%g%s: $%.2f, and $%.2f are left",
                _named(payer), 100 * state["used"], payer.budget_usd, every, state["spent_usd"], state["left_usd"],
            )  # fmt: skip


def _with_budgets(keys: Iterable[KeyRecord]) -> list[KeyRecord]:
    return [key for key in keys if key.budget_usd is not None and not key.is_expired()]


def _named(payer: Payer) -> str:
    if isinstance(payer, SharedBudget):
        return "the endpoint" if payer.name == ENDPOINT else f"tag {payer.name}"
    return f"key {payer.name}"
