"""Money of a batch: the budgets that pay for it, and its hold of each.

A batch holds the same dollars of its key's budget, of those of its tags and of the endpoint's, from its start to its
end. So it may cost no more than the least of them has left.
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
    """The budgets that pay for batches.

    Args:
        spent_usd: what is spent of an account until now, batches that have ended included; None while nobody knows.
    """

    def __init__(self, settings: BatchSettings, spent_usd: Callable[[str], float | None]) -> None:
        self._settings, self._spent_usd = settings, spent_usd
        self._budgets = totals_of(settings.ledger).budgets
        self._shared = SharedBudgets(settings.ledger)

    def payers(self, batch: Batch) -> list[Payer]:
        """Its key, its tags and the endpoint, those of them that have a budget."""
        key, tags = batch.order.key, tags_to_text(self._settings.tags(batch.progress.model, batch.order.key))
        own: list[Payer] = [key] if key.budget_usd is not None else []
        return [*own, *self._shared.of_tags(tags), *self._shared.of_endpoint()]

    def left_usd(self, payers: Sequence[Payer]) -> list[float] | None:
        """The rest of each budget, of which others may hold a part.

        None while nobody knows what is spent.
        """
        left = []
        for payer in payers:
            allowed_usd = self._budgets.allowed_usd(payer.account, payer.budget_usd, payer.budget_every)
            if (spent_usd := self._spent_usd(payer.account)) is None:
                return None
            assert allowed_usd is not None, "it has a budget"
            left.append(allowed_usd - spent_usd)
        return left

    def hold(self, batch_id: str, payers: Sequence[Payer], left_usd: Sequence[float], wanted_usd: float) -> float:
        """Hold the same of each budget, and return how much that is.

        Where one has nothing it is 0, and the batch holds what it held before.
        """
        before = {payer.account: self._budgets.held_by(batch_id, payer.account) for payer in payers}
        held_usd = wanted_usd
        for _ in range(2):  # the second time all hold what the least of them could
            for payer, left in zip(payers, left_usd, strict=True):
                held_usd = min(held_usd, self._budgets.hold_batch(batch_id, payer.account, left, held_usd))
            if held_usd <= 0:
                for account, usd in before.items():
                    self._budgets.hold_as_before(batch_id, account, usd)
                return 0.0
        return held_usd

    def held_by(self, batch_id: str, payers: Sequence[Payer]) -> float:
        """The money that a batch holds of each of its budgets."""
        return min((self._budgets.held_by(batch_id, payer.account) for payer in payers), default=0.0)

    def settle(self, batch_id: str, record: RequestUsage | None) -> None:
        """Settle a batch that has ended, in all its accounts.

        Args:
            record: as the ledger has it; None where nothing was run.
        """
        accounts = accounts_of(account_of(record), record.tags, is_batch=True) if record else ()
        self._budgets.settle_batch(batch_id, accounts, record.usd if record else 0.0)
