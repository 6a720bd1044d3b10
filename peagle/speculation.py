"""Speculation's gain: counts of accepted drafts, and the break-even model.

Pure arithmetic on counts and seconds.

One verify step of the target checks one draft of up to K tokens. It accepts a prefix of the draft and adds
one token of its own, so it yields 1 + (accepted tokens) tokens; the mean over steps is the acceptance length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Self

# A step with a drafter runs two models, so it always takes longer than one without (at K=3 on two CPU cores,
# 15 % longer). Below this length no step is cheap enough to save anything.
NEVER_PAYS_BELOW = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Acceptance counts of a request, a unit or a whole run; they add up with `+`.

    Args:
        num_drafts: verify steps that had a draft to check.
        num_draft_tokens: tokens proposed over all drafts.
        accepted_per_position: entry i counts the drafts whose token i was accepted. A draft is accepted as a
            prefix, so the entries never increase.
        num_lookup_tokens: accepted tokens that a prompt lookup drafted beside a head; the others are the head's.

    Raises:
        ValueError: the counts contradict each other.

    >>> stats = SpeculationStats(num_drafts=10, num_draft_tokens=30, accepted_per_position=(6, 3, 1))
    >>> stats.acceptance_length
    2.0
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    num_lookup_tokens: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_drafts, self.num_draft_tokens, *self.accepted_per_position, self.num_lookup_tokens)
        if not isinstance(self.accepted_per_position, tuple) or any(type(count) is not int for count in counts):
            raise ValueError(f"speculation counts must be whole numbers, got {counts}")
        if min(counts) < 0:
            raise ValueError(f"speculation counts cannot be negative, got {counts}")
        bounds = (self.num_drafts, *self.accepted_per_position)
        if any(earlier < later for earlier, later in pairwise(bounds)):
            raise ValueError(
                f"a draft is accepted as a prefix, so of {self.num_drafts} drafts the accepted by position "
                f"cannot be {list(self.accepted_per_position)}"
            )
        if self.num_accepted_tokens > self.num_draft_tokens:
            raise ValueError(f"{self.num_accepted_tokens} tokens accepted, but {self.num_draft_tokens} drafted")
        if self.num_lookup_tokens > self.num_accepted_tokens:
            raise ValueError(f"{self.num_lookup_tokens} of {self.num_accepted_tokens} accepted tokens were looked up")

    @classmethod
    def empty(cls) -> Self:
        """No drafts yet: the neutral element of `+`."""
        return cls(num_drafts=0, num_draft_tokens=0, accepted_per_position=())

    @classmethod
    def from_histogram(cls, histogram: Sequence[int], num_draft_tokens: int, num_lookup_tokens: int = 0) -> Self:
        """Statistics of vLLM's `RequestSpecDecodeMetrics`.

        Entry j counts the drafts of which j tokens were accepted.

        Worked by hand, K=2: [4, 3, 2] is 9 drafts; 3 + 2 got past position 0 and 2 past position 1.

        >>> SpeculationStats.from_histogram([4, 3, 2], num_draft_tokens=18).accepted_per_position
        (5, 2)
        """
        at_least = list(accumulate(reversed(histogram)))[::-1]
        return cls(
            num_drafts=at_least[0] if at_least else 0,
            num_draft_tokens=num_draft_tokens,
            accepted_per_position=tuple(at_least[1:]),
            num_lookup_tokens=num_lookup_tokens,
        )

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that became output."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a verify step, its own included; None before the first draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Acceptance rates by draft position; empty before the first draft."""
        if not self.num_drafts:
            return ()
        return tuple(accepted / self.num_drafts for accepted in self.accepted_per_position)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None when none was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        """Both together.

        The shorter K counts as never accepted in the positions it did not draft.
        """
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            accepted_per_position=tuple(mine + theirs for mine, theirs in pairs),
            num_lookup_tokens=self.num_lookup_tokens + other.num_lookup_tokens,
        )

    def to_dict(self) -> dict[str, object]:
        """The counts, ready for JSON; that of a lookup only where there was one."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "accepted_per_position": list(self.accepted_per_position),
            **({"num_lookup_tokens": self.num_lookup_tokens} if self.num_lookup_tokens else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: keys are missing or unknown, or the counts are not counts.
        """
        expected = {"num_drafts", "num_draft_tokens", "accepted_per_position"}
        if not isinstance(data, Mapping) or set(data) - {"num_lookup_tokens"} != expected:
            raise ValueError(f"speculation counts must have exactly the keys {sorted(expected)}, got {data!r}")
        per_position = data["accepted_per_position"]
        if not isinstance(per_position, list | tuple):
            raise ValueError(f"accepted_per_position must be a list of counts, got {per_position!r}")
        return cls(
            num_drafts=data["num_drafts"],  # type: ignore[arg-type]  # __post_init__ checks
            num_draft_tokens=data["num_draft_tokens"],  # type: ignore[arg-type]
            accepted_per_position=tuple(per_position),
            num_lookup_tokens=data.get("num_lookup_tokens", 0),  # type: ignore[arg-type]
        )


def break_even_acceptance_length(step_s_with: float, step_s_without: float) -> float:
    """The acceptance length at which drafting costs exactly what it saves.

    A step with a drafter takes `step_s_with` seconds and yields the acceptance length; one without takes
    `step_s_without` and yields 1. Worked by hand: 39 ms against 26 ms needs 39 / 26 = 1.5 tokens a step.

    Raises:
        ValueError: a step time is not positive.

    >>> break_even_acceptance_length(0.039, 0.026)
    1.5
    """
    if not (step_s_with > 0 and step_s_without > 0):
        raise ValueError(f"step times must be positive, got {step_s_with} and {step_s_without}")
    return step_s_with / step_s_without


def speedup(acceptance_length: float, step_s_with: float, step_s_without: float) -> float:
    """Output tokens/s with the drafter over those without; below 1 it costs.

    >>> speedup(3.0, 0.039, 0.026)
    2.0
    """
    return acceptance_length / break_even_acceptance_length(step_s_with, step_s_without)


def expected_acceptance_length(rates: Sequence[float], k: int) -> float:
    """Acceptance length at a smaller K, from rates by position at a larger one.

    Position i is accepted or not whatever is drafted after it, so the first k rates hold for every K >= k.

    Raises:
        ValueError: k is negative or beyond the measured positions: nothing is known there.

    >>> expected_acceptance_length([0.5, 0.25, 0.125], k=2)
    1.75
    """
    if not 0 <= k <= len(rates):
        raise ValueError(f"acceptance is known for 0 to {len(rates)} draft tokens, not for {k}")
    return 1 + sum(rates[:k])


def note(length: float | None, *, break_even: float | None = None) -> str | None:
    """The sentence for a drafter that costs more than it saves; None for any other.

    Args:
        length: the acceptance length; None before the first draft.
        break_even: the acceptance length this hardware needs at this concurrency, where somebody measured it.
            Without it only the hopeless case is known (`NEVER_PAYS_BELOW`).
    """
    if length is None:
        return None
    if break_even is not None and length < break_even:
        return (
            f"The drafter costs more than it saves: {length:.2f} tokens a step, and this hardware needs "
            f"{break_even:.2f} at this concurrency. --drafter none does without it; a smaller --num-speculative-tokens "
            "costs less."
        )
    if length < NEVER_PAYS_BELOW:
        return (
            f"The drafter costs more than it saves: {length:.2f} tokens a step, so nearly every draft is "
            "rejected. Check that the drafter was trained for this model and this kind of prompt; --drafter none does "
            "without it."
        )
    return None


def sources_note(stats: SpeculationStats) -> str | None:
    """The sentence on accepted tokens by source, where a lookup drafted beside a head.

    >>> stats = SpeculationStats.from_histogram([1, 1, 1], num_draft_tokens=6, num_lookup_tokens=1)
    >>> sources_note(stats)
    'Of 3 accepted draft tokens, 1 was found by the prompt lookup; the other 2 are the head\'s.'
    """
    looked_up, accepted = stats.num_lookup_tokens, stats.num_accepted_tokens
    if not looked_up:
        return None
    were = "was" if looked_up == 1 else "were"
    return (
        f"Of {accepted:,} accepted draft tokens, {looked_up:,} {were} found by the prompt lookup; "
        f"the other {accepted - looked_up:,} are the head's."
    )
