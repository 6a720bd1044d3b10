"""Measured times of decoding steps: a part of a card.

A table has the time of a step by method, K and concurrency on one kind of hardware. From it follows the acceptance
length that a drafter needs. It knows nothing of the model or of what is accepted.
"""

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from peagle.catalog.published import Method, Strict
from peagle.speculation import break_even_acceptance_length


class StepRow(Strict):
    """Milliseconds of a step of one method and K.

    Attributes:
        num_speculative_tokens: K; 0 with "none".
        step_ms: one for each concurrency of the table, drafting and verifying included.
    """

    method: Method
    num_speculative_tokens: int = Field(ge=0)
    step_ms: list[float] = Field(min_length=1)


class StepTable(Strict):
    """Times of steps with the card's own heads, compiled, on one kind of hardware.

    Attributes:
        precision: weights and KV cache, as `Precision.describe` has them.
        source: the measurement: figure, hardware, who.
    """

    platform: Literal["cpu", "cuda"]
    precision: str
    source: str
    concurrency: list[int] = Field(min_length=1)
    rows: list[StepRow]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if any(len(row.step_ms) != len(self.concurrency) for row in self.rows):
            raise ValueError("steps: each row has a time for each concurrency")
        if min(self.concurrency) < 1 or any(ms <= 0 for row in self.rows for ms in row.step_ms):
            raise ValueError("steps: times must be above zero, and concurrencies at least 1")
        kinds = [(row.method, row.num_speculative_tokens) for row in self.rows]
        if kinds.count(("none", 0)) != 1 or len(set(kinds)) < len(kinds):
            raise ValueError("steps: there is one row of method none with K=0, and one of each other method and K")
        return self

    def break_even(self, method: str, k: int) -> dict[int, float]:
        """The acceptance lengths below which drafting costs more than it saves.

        By requests at once. Between two measured K the time of a step is taken as a line; beyond them nothing is known.
        """
        measured = {row.num_speculative_tokens: row.step_ms for row in self.rows if row.method == method}
        step_ms = measured.get(k) or _between(measured, k)
        if step_ms is None:
            return {}
        plain = next(row.step_ms for row in self.rows if row.method == "none")
        lengths = map(break_even_acceptance_length, step_ms, plain)
        return dict(zip(self.concurrency, lengths, strict=True))


def _between(measured: dict[int, list[float]], k: int) -> list[float] | None:
    for below, above in pairwise(sorted(measured)):
        if below < k < above:
            share = (k - below) / (above - below)
            pairs = zip(measured[below], measured[above], strict=True)
            return [first + share * (second - first) for first, second in pairs]
    return None
