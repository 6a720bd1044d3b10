"""The state of all budgets, with warnings at 50, 80 and 100 %. Enforcement is in `limits.py`."""

import logging
import time
from collections.abc import Callable
from typing import Any

from peagle.economics.ledger import SessionReader
from peagle.economics.shared_budgets import (
    ENDPOINT,
    ENDPOINT_ACCOUNT,
    SharedBudget,
    engines_usd,
    period_of,
    read_tag_spending,
    sum_tag_spending,
)
from peagle.economics.spending import today
from pipelines.online.budgets import Budgets
from pipelines.online.gateway.keys import KeyRing, Payer, SharedBudgets
from pipelines.online.totals import Totals

LEVELS = (0.5, 0.8, 1.0)
_INTERVAL_S = 15.0
_log = logging.getLogger("ray.serve")


def budget_status(payer: Payer, budgets: Budgets) -> dict[str, Any]:
    """Return the spend of an account as JSON, in the current period of its budget if there is one.

    With a budget, the result also has `left_usd`, `used` (a fraction) and `alert` (the highest of `LEVELS` that was
    reached, or None). With a period, it also has `reset`, the first day of the next period.
    """
    spent_usd = budgets.spent_usd(payer.account)
    if payer.budget_usd is None:
        return {"spent_usd": round(spent_usd, 6)}
    limit_usd = budgets.spending_limit(payer.account, payer.budget_usd, payer.budget_every) or 0.0
    in_period_usd = spent_usd - (limit_usd - payer.budget_usd)
    used = in_period_usd / payer.budget_usd
    state: dict[str, Any] = {
        "spent_usd": round(in_period_usd, 6),
        "left_usd": round(max(0.0, limit_usd - spent_usd), 6),
        "used": round(used, 4),
        "alert": max((level for level in LEVELS if used >= level), default=None),
    }
    if payer.budget_every is not None:
        state["reset"] = period_of(payer.budget_every, today())[1].isoformat()
    return state


def refresh_external_spend(totals: Totals, sessions: SessionReader) -> None:
    """Update the budgets with the cost of the endpoint's engines, and with what bulk runs have spent and reserved."""
    spent, reserved = sum_tag_spending(read_tag_spending(totals.folder))
    totals.budgets.set_external_spend({**spent, ENDPOINT_ACCOUNT: engines_usd(sessions.all())}, reserved)


class BudgetWatch:
    """Watch all budgets of an endpoint.

    At every check, `on_used` receives the name of each budget and the fraction of it that is used. The name is a key's
    name, a tag, or "*" for the endpoint. `ring` is None if the endpoint has no keys.
    """

    def __init__(
        self, ring: KeyRing | None, shared: SharedBudgets, totals: Totals, *, on_used: Callable[[str, float], None]
    ) -> None:
        self._ring, self._shared, self._totals, self._on_used = ring, shared, totals, on_used
        self._sessions = SessionReader(totals.folder)
        self._warned: dict[str, tuple[float, Any]] = {}  # account -> highest logged level, and its period

    def watch_forever(self) -> None:
        while True:
            try:
                self.check()
            except Exception:  # for example an unreadable ledger; the thread must not end
                _log.exception("cannot check the budgets")
            time.sleep(_INTERVAL_S)

    def check(self) -> None:
        """Publish the used fractions, and log each newly reached level once per period."""
        keys, shared = self._ring.all() if self._ring else (), self._shared.all()
        if shared:
            refresh_external_spend(self._totals, self._sessions)
        self._totals.catch_up()
        budgeted = [key for key in keys if key.budget_usd is not None and not key.is_expired()]
        payers: list[Payer] = [*budgeted, *shared]
        for payer in payers:
            state = budget_status(payer, self._totals.budgets)
            self._on_used(payer.account if isinstance(payer, SharedBudget) else payer.name, state["used"])
            level, period = state["alert"], (payer.budget_usd, state.get("reset"))
            warned_level, warned_period = self._warned.get(payer.account, (0.0, None))
            if level is None or (warned_period == period and level <= warned_level):
                continue
            self._warned[payer.account] = level, period
            every = f" a {payer.budget_every}" if payer.budget_every else ""
            _log.warning(
                "%s has spent %.0f %% of its budget of $%g%s: $%.2f spent, $%.2f left",
                _describe(payer), 100 * state["used"], payer.budget_usd, every, state["spent_usd"], state["left_usd"],
            )  # fmt: skip


def _describe(payer: Payer) -> str:
    if isinstance(payer, SharedBudget):
        return "the endpoint" if payer.name == ENDPOINT else f"tag {payer.name}"
    return f"key {payer.name}"
