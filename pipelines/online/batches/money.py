"""Costs of batches: the expected cost, and the reservations in budgets.

A batch reserves the same amount in each budget that applies (key, tags, endpoint) until it ends, so it can cost at most
what the smallest of them has left.

Tokens are priced like recent requests of the same model, engine starts and shutdowns like the endpoint's. The estimate
is not a limit: the reservation grows with the actual cost while the budgets last.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineSession, RequestUsage
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import ending_s
from pipelines.online.batches.records import Batch, BatchProgress
from pipelines.online.batches.settings import BatchModel, BatchSettings
from pipelines.online.budgets import account_of, accounts_of
from pipelines.online.gateway.keys import Payer, SharedBudgets
from pipelines.online.totals import TokenPrice, totals_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """The expected cost of a batch in US dollars: its tokens, and starting and stopping its engines."""

    tokens_usd: float
    overhead_usd: float

    def wanted_usd(self, spent_usd: float) -> float:
        """Return the amount to reserve after `spent_usd` were spent.

        A run stops when the unspent rest no longer covers its shutdown. Reserving twice the spend prevents that
        between two ticks.
        """
        return max(self.tokens_usd, 2 * spent_usd) + self.overhead_usd


def estimate(
    progress: BatchProgress, batch_model: BatchModel, price: TokenPrice | None, sessions: Iterable[EngineSession]
) -> BatchEstimate | None:
    """Return the expected cost of a validated batch.

    Returns None if the model has not answered requests yet, or none of its engines has started.

    Args:
        price: token prices of the model.
        sessions: sessions of the endpoint's engines.
    """
    tokens_usd = price and price.shared_price(
        prompt_tokens=progress.prompt_tokens, output_tokens=progress.output_tokens
    )
    started = [
        session for session in sessions if session.model == progress.model and (session.busy_s or session.idle_s)
    ]
    if not tokens_usd or not started:
        return None
    ending = ending_s(GenerateConfig.model_fields["grace_s"].default)
    loads = not batch_model.lent_slots
    each_usd = max(
        (loads * (session.load_s + session.compile_s) + ending) * session.num_devices * session.usd_per_device_s
        for session in started
    )
    return BatchEstimate(
        tokens_usd=tokens_usd, overhead_usd=EngineRange.parse(batch_model.config["engines"]).largest * each_usd
    )


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
        """Return those of the batch's key, its tags and the endpoint that have budgets."""
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
        return min((self._budgets.reserved_by_batch(batch_id, payer.account) for payer in payers), default=0.0)

    def settle(self, batch_id: str, record: RequestUsage | None) -> None:
        """Replace the reservations of an ended batch with its cost; `record` is None if nothing ran."""
        accounts = accounts_of(account_of(record), record.tags, is_batch=True) if record else ()
        self._budgets.settle_batch(batch_id, accounts, record.usd if record else 0.0)
