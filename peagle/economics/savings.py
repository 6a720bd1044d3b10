"""Savings from drafters and spot machines, and the cost of prompts and generation.

A request has one step per draft. With `n` concurrent requests, each is billed 1/n of each step of `step_s` seconds. The
rest of a request's busy seconds is the cost of its prompt. Without the drafter, it would need one step per token:

    generation           drafts x step_s / n
    without a drafter    generation x acceptance length / break-even acceptance length

Example: 8 concurrent requests, steps of 80 ms with the drafter and 40 ms without, so the break-even is 2.0. A request
of 12 busy seconds has 1,000 drafts with 1,500 accepted tokens: an acceptance length of 2.5. Its generation takes
1,000 x 0.08 / 8 = 10 s, its prompt 2 s. Without the drafter, generation would take
10 x 2.5 / 2.0 = 12.5 s; 2.5 s are saved.

Unknown amounts are added up separately and never count as zero.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

from peagle.economics.baseline import Baseline
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, Work
from peagle.speculation import num_decoding_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Dollars with and without a drafter or spot machines. Add them with `+`.

    Attributes:
        prompt_usd, generation_usd: cost of prompts and of generation, for work with measured step times.
        unsplit_usd: cost of work without measured step times.
        drafted_usd: cost of generation with a drafter, if its step times are measured.
        undrafted_usd: estimated cost of the same generation without the drafter; `error_usd` is its error.
        uncompared_usd: cost of work with a drafter whose step times are not measured.
        spot_usd: cost of spot machines, including lost work.
        on_demand_usd: estimated cost of the same work on on-demand machines, where no work is lost.
        unpriced_spot_usd: cost of spot machines without a known on-demand price.
    """

    prompt_usd: float = 0.0
    generation_usd: float = 0.0
    unsplit_usd: float = 0.0
    drafted_usd: float = 0.0
    undrafted_usd: float = 0.0
    error_usd: float = 0.0
    uncompared_usd: float = 0.0
    num_steps: int = 0  # with a drafter
    num_accepted_tokens: int = 0
    spot_usd: float = 0.0
    on_demand_usd: float = 0.0
    unpriced_spot_usd: float = 0.0
    is_error_known: bool = True
    sources: frozenset[str] = frozenset()

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _ADDED_FIELDS}
        return type(self)(
            **sums,
            is_error_known=self.is_error_known and other.is_error_known,
            sources=self.sources | other.sources,
        )

    @property
    def saved_usd(self) -> float:
        """Dollars saved by speculation; negative if it costs more than it saves."""
        return self.undrafted_usd - self.drafted_usd

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else None

    @property
    def break_even(self) -> float | None:
        """The acceptance length at which the drafter would have cost as much as it saved."""
        if self.acceptance_length is None or not self.undrafted_usd:
            return None
        return round(self.acceptance_length * self.drafted_usd / self.undrafted_usd, _DECIMALS)

    def loss_note(self, name: str) -> str | None:
        """Return a warning if speculation costs more than it saves, beyond the error; else None."""
        if self.acceptance_length is None or self.break_even is None or self.saved_usd + self.error_usd >= 0:
            return None
        return (
            f"Speculation loses money: generation with {name} cost ${-self.saved_usd:.3g} more than without, at an "
            f"acceptance length of {self.acceptance_length:.2f} where {self.break_even:.2f} breaks even. "
            "Use --drafter none, or a smaller --num-speculative-tokens."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the savings for JSON. None means unknown or not applicable; `usd` is the amount saved."""
        is_compared, is_spot, is_split = self.drafted_usd > 0, self.spot_usd > 0, bool(self.sources)

        def usd(amount: float, *, is_known: bool) -> float | None:
            return round(amount, _DECIMALS) if is_known else None

        return {
            "speculation": {
                "usd": usd(self.saved_usd, is_known=is_compared),
                "error_usd": usd(self.error_usd, is_known=is_compared and self.is_error_known),
                "with_usd": usd(self.drafted_usd, is_known=is_compared),
                "without_usd": usd(self.undrafted_usd, is_known=is_compared),
                "acceptance_length": self.acceptance_length,
                "break_even_acceptance_length": self.break_even,
                "unknown_usd": round(self.uncompared_usd, _DECIMALS),
            },
            "spot": {
                "usd": usd(self.on_demand_usd - self.spot_usd, is_known=is_spot),
                "spot_usd": usd(self.spot_usd, is_known=is_spot),
                "on_demand_usd": usd(self.on_demand_usd, is_known=is_spot),
                "unknown_usd": round(self.unpriced_spot_usd, _DECIMALS),
            },
            "prompt_usd": usd(self.prompt_usd, is_known=is_split),
            "generation_usd": usd(self.generation_usd, is_known=is_split),
            "unsplit_usd": round(self.unsplit_usd, _DECIMALS),
            "sources": sorted(self.sources),
        }


_DECIMALS = 9  # of dollars and of the break-even
_ADDED_FIELDS = tuple(field.name for field in fields(Savings) if field.name not in ("is_error_known", "sources"))


def work_savings(work: Work, *, has_drafter: bool, baseline: Baseline | None) -> Savings:
    """Return the savings of work. Without a drafter, each token after a request's first token takes a step."""
    num_later_tokens = max(work.num_output_tokens - work.num_requests, 0)
    num_steps = num_decoding_steps(num_later_tokens, work.num_drafts, work.num_accepted_tokens)
    has_known_steps = not has_drafter or work.num_drafts > 0 or num_later_tokens == 0
    if baseline is None or not has_known_steps or not work.busy_s or not work.request_s:
        return Savings(unsplit_usd=work.usd, uncompared_usd=work.usd if has_drafter else 0.0)
    times = baseline.at(work.request_s / work.busy_s)  # at the mean concurrency
    generation_s = num_steps * times.step_s / times.concurrency
    generation_usd = work.usd * min(generation_s / work.busy_s, 1.0)
    cost_split = Savings(
        prompt_usd=work.usd - generation_usd, generation_usd=generation_usd, sources=frozenset([baseline.source])
    )
    if not has_drafter or not num_steps:
        return cost_split
    undrafted_usd = generation_usd * (1 + work.num_accepted_tokens / num_steps) / times.break_even
    return cost_split + Savings(
        drafted_usd=generation_usd,
        undrafted_usd=undrafted_usd,
        error_usd=undrafted_usd * (times.error or 0.0),
        is_error_known=times.error is not None,
        num_steps=num_steps,
        num_accepted_tokens=work.num_accepted_tokens,
    )


def spot_savings(price: EngineSession | Price, *, kept_usd: float, lost_usd: float) -> Savings:
    """Return the savings of a spot machine. On demand, only `kept_usd` (without lost work) would be paid for."""
    if price.market != "spot":
        return Savings()
    usd = kept_usd + lost_usd
    if not (price.on_demand_usd_per_device_s and price.usd_per_device_s):
        return Savings(unpriced_spot_usd=usd)
    ratio = price.on_demand_usd_per_device_s / price.usd_per_device_s
    return Savings(spot_usd=usd, on_demand_usd=kept_usd * ratio)
