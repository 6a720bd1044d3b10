"""The expected cost of a batch, which it reserves in its budgets.

Tokens are priced like recent requests of the same model, engine starts and shutdowns like the endpoint's. The estimate
is not a limit: the reservation grows with the actual cost while the budgets last.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from peagle.economics.usage import EngineSession
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import ending_s
from pipelines.online.batches.records import BatchProgress
from pipelines.online.batches.settings import BatchModel
from pipelines.online.ledger_totals import TokenPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """The expected cost of a batch in US dollars.

    Attributes:
        tokens_usd: of all prompts and answers.
        overhead_usd: of starting and stopping engines.
    """

    tokens_usd: float
    overhead_usd: float

    def wanted_usd(self, spent_usd: float) -> float:
        """Return the amount to reserve after `spent_usd` were spent.

        A run stops when the rest no longer covers its shutdown. Reserving twice the spend keeps it away from that point
        between two ticks.
        """
        return max(self.tokens_usd, 2 * spent_usd) + self.overhead_usd


def estimate(
    progress: BatchProgress, batch_model: BatchModel, price: TokenPrice | None, sessions: Iterable[EngineSession]
) -> BatchEstimate | None:
    """Return the expected cost of a validated batch.

    Returns:
        None if the model has not answered requests yet, or none of its engines has started.

    Args:
        price: of the model's tokens.
        sessions: of the endpoint's engines.
    """
    tokens_usd = price and price.shared_price(
        prompt_tokens=progress.prompt_tokens, output_tokens=progress.output_tokens
    )
    started = [one for one in sessions if one.model == progress.model and (one.busy_s or one.idle_s)]
    if not tokens_usd or not started:
        return None
    ending = ending_s(GenerateConfig.model_fields["grace_s"].default)
    loads = not batch_model.lent_slots
    each_usd = max(
        (loads * (one.load_s + one.compile_s) + ending) * one.num_devices * one.usd_per_device_s for one in started
    )
    return BatchEstimate(
        tokens_usd=tokens_usd, overhead_usd=EngineRange.parse(batch_model.config["engines"]).largest * each_usd
    )
