"""Measured times of decoding steps on a model's card, from which the break-even acceptance length follows."""

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from peagle.catalog.published import Method, Strict
from peagle.speculation import break_even_acceptance_length


class StepRow(Strict):
    """Step times of one method and K.

    Attributes:
        num_speculative_tokens: K; 0 with "none".
        step_ms: one value per concurrency, including drafting and verification.
        spread: range of the repeats divided by their median, per concurrency; empty if unknown.
    """

    method: Method
    num_speculative_tokens: int = Field(ge=0)
    step_ms: list[float] = Field(min_length=1)
    spread: list[float] = Field(default_factory=list)


class StepTable(Strict):
    """Step times by method, K and concurrency on one kind of hardware, compiled, with the card's heads.

    Attributes:
        precision: weights and KV cache, from `Precision.describe`.
        hardware: from `Hardware.describe`; empty if unknown.
        source: the measurement.
    """

    platform: Literal["cpu", "cuda"]
    precision: str
    hardware: str = ""
    source: str
    concurrency: list[int] = Field(min_length=1)
    rows: list[StepRow]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if any(len(row.step_ms) != len(self.concurrency) for row in self.rows):
            raise ValueError("steps: each row must have a time per concurrency")
        if any(len(row.spread) not in (0, len(self.concurrency)) for row in self.rows):
            raise ValueError("steps: spread must be empty or have a value per concurrency")
        if min(self.concurrency) < 1 or any(ms <= 0 for row in self.rows for ms in row.step_ms):
            raise ValueError("steps: times must be above zero, and concurrencies at least 1")
        if self.concurrency != sorted(set(self.concurrency)):
            raise ValueError("steps: concurrencies must ascend")
        kinds = [(row.method, row.num_speculative_tokens) for row in self.rows]
        if kinds.count(("none", 0)) != 1 or len(set(kinds)) < len(kinds):
            raise ValueError("steps: there must be one row with method none and K=0, and one per other method and K")
        return self

    def break_even(self, method: str, k: int) -> dict[int, float]:
        """Return the break-even acceptance length by concurrency; empty if unknown."""
        row = self.row(method, k)
        if row is None:
            return {}
        lengths = map(break_even_acceptance_length, row.step_ms, self.plain.step_ms)
        return dict(zip(self.concurrency, lengths, strict=True))

    @property
    def plain(self) -> StepRow:
        """The row without a drafter."""
        return next(row for row in self.rows if row.method == "none")

    def row(self, method: str, k: int) -> StepRow | None:
        """Return the row of a method and K, interpolated between measured K; None outside their range."""
        measured = {row.num_speculative_tokens: row for row in self.rows if row.method == method}
        return measured.get(k) or _between(measured, k)


def _between(measured: dict[int, StepRow], k: int) -> StepRow | None:
    for below, above in pairwise(sorted(measured)):
        if below < k < above:
            first, second, share = measured[below], measured[above], (k - below) / (above - below)
            step_ms = [one + share * (two - one) for one, two in zip(first.step_ms, second.step_ms, strict=True)]
            spread = list(map(max, first.spread, second.spread))
            return StepRow(method=first.method, num_speculative_tokens=k, step_ms=step_ms, spread=spread)
    return None
