"""Measured step times with and without a drafter, used to compute savings.

An engine session in the ledger contains the baseline of its engine as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

from peagle.errors import PeagleError
from peagle.speculation import break_even_acceptance_length


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Step times at one concurrency.

    `plain_step_s` is the time without the drafter; it equals `step_s` for an engine without a drafter. `error` is the
    relative error of the ratio of the two times, or None if it is unknown.
    """

    concurrency: float
    step_s: float
    plain_step_s: float
    error: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.concurrency, self.step_s, self.plain_step_s, 0.0 if self.error is None else self.error)
        if any(type(number) not in (int, float) for number in numbers):
            raise ValueError(f"concurrency, step times and error must be numbers, got {numbers}")
        if not (1 <= self.concurrency < float("inf") and 0 <= (self.error or 0.0) < float("inf")):
            raise ValueError(f"invalid concurrency {self.concurrency} or error {self.error} of step times")
        if not (0 < self.step_s < float("inf") and 0 < self.plain_step_s < float("inf")):
            raise ValueError(f"step times must be finite and above 0, got {self.step_s} and {self.plain_step_s} s")

    @property
    def break_even(self) -> float:
        return break_even_acceptance_length(self.step_s, self.plain_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Step times by ascending concurrency, and the measurement that they come from."""

    source: str
    steps: tuple[StepTimes, ...]

    def __post_init__(self) -> None:
        if not self.steps or any(step.concurrency >= next_step.concurrency for step, next_step in pairwise(self.steps)):
            raise ValueError("the steps of a baseline must have ascending concurrency")

    def at(self, concurrency: float) -> StepTimes:
        """Return the step times at a concurrency; outside the measured range, those of the nearest measurement.

        Between two measurements, times are interpolated, and the error is the larger of the two.

        >>> steps = (StepTimes(concurrency=1, step_s=0.03, plain_step_s=0.02), StepTimes(concurrency=3, step_s=0.05,
        ...     plain_step_s=0.02))
        >>> Baseline(source="bench", steps=steps).at(2)
        StepTimes(concurrency=2.0, step_s=0.04, plain_step_s=0.02, error=None)
        """
        first, last = self.steps[0], self.steps[-1]
        if concurrency <= first.concurrency:
            return first
        if concurrency >= last.concurrency:
            return last
        below, above = next(pair for pair in pairwise(self.steps) if pair[1].concurrency >= concurrency)
        weight = (concurrency - below.concurrency) / (above.concurrency - below.concurrency)
        return StepTimes(
            concurrency=float(concurrency),
            step_s=(1 - weight) * below.step_s + weight * above.step_s,
            plain_step_s=(1 - weight) * below.plain_step_s + weight * above.plain_step_s,
            error=None if below.error is None or above.error is None else max(below.error, above.error),
        )

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Parse the result of `to_text`; return None for an empty string."""
        return cls.from_dict(json.loads(text)) if text else None

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        try:
            return cls(source=str(data["source"]), steps=tuple(StepTimes(**step) for step in data["steps"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a baseline: {data!r}") from error


def recorded_baseline(run: Mapping[str, Any]) -> Baseline | None:
    """Return the baseline in `run["baseline"]`, or None if it is missing."""
    try:
        return Baseline.from_dict(run["baseline"]) if run.get("baseline") else None
    except ValueError as error:
        raise PeagleError(f"the run's baseline is damaged: {error}") from error


def ratio_error(spreads: Sequence[float | None]) -> float | None:
    """Return the relative error of the ratio of two measurements, from their relative spreads.

    The error is half the sum of the spreads, or None if a spread is unknown.

    >>> ratio_error([0.04, 0.06])
    0.05
    """
    halves = [spread / 2 for spread in spreads if spread is not None]
    return sum(halves) if len(halves) == len(spreads) else None
