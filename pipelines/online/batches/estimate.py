"""The probable cost of a batch, which it holds of its key's budget.

Tokens are priced as the endpoint's requests of the model have paid them; starting and ending its engines as those of
the endpoint took. An estimate is no limit: the scheduler lets what a batch holds grow with what it spends, as long as
there is something left.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from peagle.economics.usage import EngineSession
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import ending_s
from pipelines.online.batches.records import BatchProgress
from pipelines.online.batches.settings import Recipe
from pipelines.online.sums import TokenPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """US dollars of a batch.

    Attributes:
        tokens_usd: of all prompts and answers.
        around_usd: of engines that load, and that end.
    """

    tokens_usd: float
    around_usd: float

    def wanted_usd(self, spent_usd: float) -> float:
        """The dollars to hold of a budget where so much is spent.

        A run stops when what is left no longer reaches for its end. With twice of what is spent it never comes near to
        that between two looks.
        """
        return max(self.tokens_usd, 2 * spent_usd) + self.around_usd


def estimate(
    progress: BatchProgress, recipe: Recipe, price: TokenPrice | None, sessions: Iterable[EngineSession]
) -> BatchEstimate | None:
    """The estimate of a batch whose input was checked.

    None where nobody knows: no request of the model has been answered, or no engine of it has started.

    Args:
        price: of its model's tokens.
        sessions: of the endpoint's engines.
    """
    tokens_usd = price and price.beside_others(
        prompt_tokens=progress.prompt_tokens, output_tokens=progress.output_tokens
    )
    started = [one for one in sessions if one.model == progress.model and (one.busy_s or one.idle_s)]
    if not tokens_usd or not started:
        return None
    ending = ending_s(GenerateConfig.model_fields["grace_s"].default)
    loads = not recipe.lent_slots
    each_usd = max(
        (loads * (one.load_s + one.compile_s) + ending) * one.num_devices * one.usd_per_device_s for one in started
    )
    return BatchEstimate(
        tokens_usd=tokens_usd, around_usd=EngineRange.parse(recipe.config["engines"]).largest * each_usd
    )
