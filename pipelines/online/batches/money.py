"""Budgets of batches.

A batch reserves the same amount in each budget that applies (key, tags, endpoint) until it ends, so it can cost at most
what the smallest of them has left.
"""

from collections.abc import Callable, Sequence

from peagle.economics.tags import tags_to_text
from peagle.economics.usage import RequestUsage
from pipelines.online.batches.records import Batch
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.budgets import account_of, accounts_of
from pipelines.online.gateway.shared import Payer, SharedBudgets
from pipelines.online.totals import totals_of


class BatchMoney:
    """Reserves and settles the cost of batches.

    Args:
        spent_usd: returns the current spend of an account including ended batches; None if unknown.
    """

    def __init__(self, settings: BatchSettings, spent_usd: Callable[[str], float | None]) -> None:
        self._settings, self._spent_usd = settings, spent_usd
        self._budgets = totals_of(settings.ledger).budgets
        self._shared = SharedBudgets(settings.ledger)

    def payers(self, batch: Batch) -> list[Payer]:
        """Return the batch's key, tags and endpoint as far as they have budgets."""
        key, tags = batch.request.key, tags_to_text(self._settings.tags(batch.progress.model, batch.request.key))
        own: list[Payer] = [key] if key.budget_usd is not None else []
        return [*own, *self._shared.of_tags(tags), *self._shared.of_endpoint()]

    def left_usd(self, payers: Sequence[Payer]) -> list[float] | None:
        """Return what is left of each budget, ignoring reservations. None if the spend is still unknown."""
        left = []
        for payer in payers:
            limit_usd = self._budgets.spending_limit(payer.account, payer.budget_usd, payer.budget_every)
            if (spent_usd := self._spent_usd(payer.account)) is None:
                return None
            assert limit_usd is not None, "payers have a budget"
            left.append(limit_usd - spent_usd)
        return left

    def hold(self, batch_id: str, payers: Sequence[Payer], left_usd: Sequence[float], wanted_usd: float) -> float:
        """Reserve the same amount in all budgets, replacing the previous reservation, and return it.

        If a budget has nothing left, the previous reservation stays and 0 is returned.
        """
        before = {payer.account: self._budgets.reserved_by_batch(batch_id, payer.account) for payer in payers}
        held_usd = wanted_usd
        for _ in range(2):  # the second pass reserves the smallest amount everywhere
            for payer, left in zip(payers, left_usd, strict=True):
                held_usd = min(held_usd, self._budgets.reserve_batch(batch_id, payer.account, left, held_usd))
            if held_usd <= 0:
                for account, usd in before.items():
                    self._budgets.restore_batch_reservation(batch_id, account, usd)
                return 0.0
        return held_usd

    def held_by(self, batch_id: str, payers: Sequence[Payer]) -> float:
        """Return what the batch has reserved in each of its budgets."""
        return min((self._budgets.reserved_by_batch(batch_id, payer.account) for payer in payers), default=0.0)

    def settle(self, batch_id: str, record: RequestUsage | None) -> None:
        """Replace the reservations of an ended batch by its cost.

        Args:
            record: as in the ledger; None if nothing ran.
        """
        accounts = accounts_of(account_of(record), record.tags, is_batch=True) if record else ()
        self._budgets.settle_batch(batch_id, accounts, record.usd if record else 0.0)
