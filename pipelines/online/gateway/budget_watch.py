"""The state of keys' budgets, and a warning at 50, 80 and 100 % of each.

It looks now and then and refuses nothing; that is `limits.py`. It knows keys and their spending, and neither HTTP nor
Ray.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from peagle.economics.spending import today
from pipelines.online.budgets import Budgets, period_of
from pipelines.online.gateway.keys import KeyRecord, KeyRing
from pipelines.online.totals import Totals

LEVELS = (0.5, 0.8, 1.0)
_EVERY_S = 15.0
_log = logging.getLogger("ray.serve")


def budget_of(key: KeyRecord, budgets: Budgets) -> dict[str, Any]:
    """The dollars that a key has spent, in this period of its budget where it has one.

    Returns:
        `spent_usd`; with a budget also `left_usd`, `used` (its share, 1.0 where nothing is left) and `alert` (the
        highest of `LEVELS` that is reached; None below them); with a period `reset`, the first day of the next one.
    """
    spent_usd = budgets.spent_usd(key.account)
    if key.budget_usd is None:
        return {"spent_usd": round(spent_usd, 6)}
    allowed_usd = budgets.allowed_usd(key.account, key.budget_usd, key.budget_every) or 0.0
    in_period_usd = spent_usd - (allowed_usd - key.budget_usd)
    used = in_period_usd / key.budget_usd
    state: dict[str, Any] = {
        "spent_usd": round(in_period_usd, 6),
        "left_usd": round(max(0.0, allowed_usd - spent_usd), 6),
        "used": round(used, 4),
        "alert": max((level for level in LEVELS if used >= level), default=None),
    }
    if key.budget_every is not None:
        state["reset"] = period_of(key.budget_every, today())[1].isoformat()
    return state


class BudgetWatch:
    """The watch over the budgets of all keys.

    Args:
        tell: told the share of its budget that each key has used, with each look.
    """

    def __init__(self, ring: KeyRing, totals: Totals, *, tell: Callable[[str, float], None]) -> None:
        self._ring, self._totals, self._tell = ring, totals, tell
        self._said: dict[str, tuple[float, Any]] = {}  # by account: the highest level, and the budget's period

    def keep_looking(self) -> None:
        """Look as long as this process lives."""
        while True:
            try:
                self.look()
            except Exception:  # the ledger or the keys cannot be read now; the thread must not end
                _log.exception("budgets are not watched now")
            time.sleep(_EVERY_S)

    def look(self) -> None:
        """Say of each budget the highest level that it has reached, once in its period."""
        self._totals.catch_up()
        for key in _with_budgets(self._ring.all()):
            state = budget_of(key, self._totals.budgets)
            self._tell(key.name, state["used"])
            level, period = state["alert"], (key.budget_usd, state.get("reset"))
            said, said_of = self._said.get(key.account, (0.0, None))
            if level is None or (said_of == period and level <= said):
                continue
            self._said[key.account] = level, period
            every = f" a {key.budget_every}" if key.budget_every else ""
            _log.warning(
                "key %s has spent %.0f %% of its budget of $%g%s: $%.2f, and $%.2f are left",
                key.name, 100 * state["used"], key.budget_usd, every, state["spent_usd"], state["left_usd"],
            )  # fmt: skip


def _with_budgets(keys: Iterable[KeyRecord]) -> list[KeyRecord]:
    return [key for key in keys if key.budget_usd is not None and not key.is_expired()]
