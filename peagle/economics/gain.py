"""Savings of drafters and spot machines; the cost of prompts and generation.

Pure: work and a measured baseline in, dollars out. Each sum adds up, and what is not known is a sum of its own, so that
it is never taken for nothing.

A request has a step for each draft. As one of `n` at once it pays an nth of the `step_s` seconds of each. The rest of
its busy seconds were its prompt's. Without the drafter it would have had a step for each token:

    generation     drafts x step_s / n
    without        generation x acceptance length / break-even acceptance length

Worked by hand: 8 at once, steps of 80 ms with the drafter and 40 ms without, so that drafts break even at 2.0. A
request of 12 busy seconds had 1,000 drafts with 1,500 accepted tokens, an acceptance length of 2.5. Its generation took
1,000 x 0.08 / 8 = 10 s, its prompt 2 s. Without the drafter generation would have taken 10 x 2.5 / 2.0 = 12.5 s: 2.5 s
are saved.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

from peagle.economics.baseline import Baseline
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession
from peagle.economics.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Dollars to compare; they add up with `+`.

    Attributes:
        prompt_usd, generation_usd: of work with measured step times.
        unsplit_usd: of all other work.
        drafted_usd: generation with a drafter that can be compared; `undrafted_usd` is what it would have cost without.
        error_usd: by so much `undrafted_usd` may be wrong.
        is_error_known: False where a part of it has no error.
        uncompared_usd: work with a drafter that cannot be compared.
        num_drafts, num_accepted_tokens: of what is compared.
        spot_usd: engines on spot machines, their lost work included; `on_demand_usd` is what they would have cost on
            demand, where nothing is lost.
        unpriced_spot_usd: engines on spot machines whose price on demand is not known.
        sources: of the step times.
    """

    prompt_usd: float = 0.0
    generation_usd: float = 0.0
    unsplit_usd: float = 0.0
    drafted_usd: float = 0.0
    undrafted_usd: float = 0.0
    error_usd: float = 0.0
    uncompared_usd: float = 0.0
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    spot_usd: float = 0.0
    on_demand_usd: float = 0.0
    unpriced_spot_usd: float = 0.0
    is_error_known: bool = True
    sources: frozenset[str] = frozenset()

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return type(self)(
            **sums,
            is_error_known=self.is_error_known and other.is_error_known,
            sources=self.sources | other.sources,
        )

    @property
    def saved_usd(self) -> float:
        """By speculation; negative where it costs more than it saves."""
        return self.undrafted_usd - self.drafted_usd

    @property
    def acceptance_length(self) -> float | None:
        """Of what is compared."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def break_even(self) -> float | None:
        """The acceptance length at which it would have cost the same without a drafter."""
        if self.acceptance_length is None or not self.undrafted_usd:
            return None
        return round(self.acceptance_length * self.drafted_usd / self.undrafted_usd, _DIGITS)

    def loss_note(self, whose: str) -> str | None:
        """The sentence for speculation that costs more than it saves.

        None for any other, and where the error reaches to nothing saved.

        Args:
            whose: the drafter and its model.
        """
        if self.acceptance_length is None or self.break_even is None or self.saved_usd + self.error_usd >= 0:
            return None
        return (
            f"Speculation loses money: generation with {whose} cost ${-self.saved_usd:.3g} more than without, at an "
            f"acceptance length of {self.acceptance_length:.2f} where {self.break_even:.2f} breaks even. "
            "--drafter none does without it; a smaller --num-speculative-tokens costs less."
        )

    def to_dict(self) -> dict[str, Any]:
        """The savings, ready for JSON.

        None is unknown, and where there was nothing to save.

        Returns:
            `speculation` (`usd` and its `error_usd`; `with_usd` of generation with the drafter and `without_usd` of the
            same without; `acceptance_length`, `break_even_acceptance_length`; `unknown_usd` of work that is not in it),
            `spot` (`usd`; `spot_usd`, and `on_demand_usd` of the same on demand; `unknown_usd`), `prompt_usd`,
            `generation_usd` and `unsplit_usd`, and `sources` of the step times.
        """
        is_compared, is_spot, is_split = self.drafted_usd > 0, self.spot_usd > 0, bool(self.sources)

        def usd(amount: float, *, is_known: bool = True) -> float | None:
            return round(amount, _DIGITS) if is_known else None

        return {
            "speculation": {
                "usd": usd(self.saved_usd, is_known=is_compared),
                "error_usd": usd(self.error_usd, is_known=is_compared and self.is_error_known),
                "with_usd": usd(self.drafted_usd, is_known=is_compared),
                "without_usd": usd(self.undrafted_usd, is_known=is_compared),
                "acceptance_length": self.acceptance_length,
                "break_even_acceptance_length": self.break_even,
                "unknown_usd": usd(self.uncompared_usd),
            },
            "spot": {
                "usd": usd(self.on_demand_usd - self.spot_usd, is_known=is_spot),
                "spot_usd": usd(self.spot_usd, is_known=is_spot),
                "on_demand_usd": usd(self.on_demand_usd, is_known=is_spot),
                "unknown_usd": usd(self.unpriced_spot_usd),
            },
            "prompt_usd": usd(self.prompt_usd, is_known=is_split),
            "generation_usd": usd(self.generation_usd, is_known=is_split),
            "unsplit_usd": usd(self.unsplit_usd),
            "sources": sorted(self.sources),
        }


_DIGITS = 9  # of a dollar, as in a statement
_ADDED = tuple(field.name for field in fields(Gain) if field.name not in ("is_error_known", "sources"))


def gain_of(work: Work, *, has_drafter: bool, baseline: Baseline | None) -> Gain:
    """The gain of work with a drafter or without: its saving, and its generation.

    Without a drafter each token after a request's first one is a step.
    """
    num_later_tokens = max(work.num_output_tokens - work.num_requests, 0)
    num_steps = work.num_drafts if has_drafter else num_later_tokens
    is_told = num_steps > 0 or num_later_tokens == 0
    if baseline is None or not is_told or not work.busy_s or not work.request_s:
        return Gain(unsplit_usd=work.usd, uncompared_usd=work.usd if has_drafter else 0.0)
    step = baseline.at(work.request_s / work.busy_s)
    generation_s = num_steps * step.step_s / step.concurrency
    generation_usd = work.usd * min(generation_s / work.busy_s, 1.0)
    split = Gain(
        prompt_usd=work.usd - generation_usd, generation_usd=generation_usd, sources=frozenset([baseline.source])
    )
    if not has_drafter or not num_steps:
        return split
    undrafted_usd = generation_usd * (1 + work.num_accepted_tokens / num_steps) / step.break_even
    return split + Gain(
        drafted_usd=generation_usd,
        undrafted_usd=undrafted_usd,
        error_usd=undrafted_usd * (step.error or 0.0),
        is_error_known=step.error is not None,
        num_drafts=num_steps,
        num_accepted_tokens=work.num_accepted_tokens,
    )


def spot_gain(paid: EngineSession | Price, *, kept_usd: float, lost_usd: float) -> Gain:
    """The gain of engines on a spot machine.

    On demand no machine is taken away, so what was lost is on the one side alone.
    """
    if paid.market != "spot":
        return Gain()
    usd = kept_usd + lost_usd
    if not (paid.on_demand_usd_per_device_s and paid.usd_per_device_s):
        return Gain(unpriced_spot_usd=usd)
    ratio = paid.on_demand_usd_per_device_s / paid.usd_per_device_s
    return Gain(spot_usd=usd, on_demand_usd=kept_usd * ratio)
