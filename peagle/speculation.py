"""Acceptance statistics of speculation, and the break-even model.

A verify step of the target checks a draft of up to K tokens. It accepts a prefix of the draft and adds one token, so it
yields 1 + (accepted tokens) tokens; the mean over steps is the acceptance length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Self

# A step with a drafter is assumed to take at least 5 % longer than a step without (15 % at K=3 on two CPU cores). So
# below this acceptance length, a drafter never saves time.
NEVER_PAYS_BELOW = 1.05


def num_decoding_steps(num_later_tokens: int, num_drafts: int, num_accepted_tokens: int) -> int:
    """Return the number of decoding steps, including steps whose drafts were not verified.

    A step yields a token of the target plus accepted drafts. If all steps verify drafts, `num_drafts` is exact.
    Otherwise the result is slightly too low, because drafts that are accepted after the end of a response count, too.

    Args:
        num_later_tokens: output tokens, without the first one of each request.
    """
    return max(num_drafts, num_later_tokens - num_accepted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Acceptance counts of a request, a unit or a run. Add them with `+`. Contradictory counts raise ValueError.

    Attributes:
        num_drafts: number of verify steps with a draft.
        accepted_per_position: entry i counts drafts whose token i was accepted; never increases, because a draft is
            accepted as a prefix.
        num_lookup_tokens: accepted tokens of the prompt lookup; the others are the head's.
        num_dropped_tokens: drafted tokens that were not worth verifying; not part of `num_draft_tokens`.
        verified_per_position: entry i counts drafts whose token i was verified; empty if all tokens were verified.

    >>> SpeculationStats(num_drafts=10, num_draft_tokens=30, accepted_per_position=(6, 3, 1)).acceptance_length
    2.0
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    num_lookup_tokens: int = 0
    num_dropped_tokens: int = 0
    verified_per_position: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        per_position = (self.accepted_per_position, self.verified_per_position)
        totals = (self.num_drafts, self.num_draft_tokens, self.num_lookup_tokens, self.num_dropped_tokens)
        counts = (*totals, *chain.from_iterable(per_position))
        are_tuples = all(isinstance(position_counts, tuple) for position_counts in per_position)
        if not are_tuples or any(type(count) is not int for count in counts):
            raise ValueError(f"speculation counts must be whole numbers, got {counts}")
        if min(counts) < 0:
            raise ValueError(f"speculation counts cannot be negative, got {counts}")
        never_increasing = (self.num_drafts, *self.accepted_per_position)
        if any(earlier < later for earlier, later in pairwise(never_increasing)):
            raise ValueError(
                f"only a prefix of a draft is accepted, so the accepted tokens per position of {self.num_drafts} "
                f"drafts cannot be {list(self.accepted_per_position)}"
            )
        verified = self.verified_counts
        if any(a > v for a, v in zip(self.accepted_per_position, verified, strict=True)):
            raise ValueError(
                f"accepted tokens per position, {self.accepted_per_position}, exceed verified tokens, {verified}"
            )
        if self.num_accepted_tokens > self.num_draft_tokens:
            raise ValueError(f"{self.num_accepted_tokens} tokens accepted, but {self.num_draft_tokens} drafted")
        if self.num_lookup_tokens > self.num_accepted_tokens:
            raise ValueError(f"{self.num_lookup_tokens} lookup tokens exceed {self.num_accepted_tokens} accepted")

    @classmethod
    def empty(cls) -> Self:
        return cls(num_drafts=0, num_draft_tokens=0, accepted_per_position=())

    @classmethod
    def from_histogram(cls, histogram: Sequence[int], num_draft_tokens: int, peagle_counts: Sequence[int] = ()) -> Self:
        """Return the counts of vLLM's metrics. Entry j of `histogram` counts drafts with j accepted tokens.

        Example with K=2: of the 9 drafts in [4, 3, 2], 3 + 2 passed position 0, and 2 passed position 1.

        Args:
            peagle_counts: counts from `peagle.engine.vllm_drafts`: accepted lookup tokens, dropped tokens, verified per
                position.
        """
        num_lookup_tokens, num_dropped_tokens, *verified = peagle_counts or (0, 0)
        num_at_least = list(accumulate(reversed(histogram)))[::-1]
        return cls(
            num_drafts=num_at_least[0] if num_at_least else 0,
            num_draft_tokens=num_draft_tokens,
            accepted_per_position=tuple(num_at_least[1:]),
            num_lookup_tokens=num_lookup_tokens,
            num_dropped_tokens=num_dropped_tokens,
            verified_per_position=tuple(verified),
        )

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verify step, including the target's own; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Acceptance rates by draft position, of the verified tokens; empty without drafts."""
        if not self.num_drafts:
            return ()
        pairs = zip(self.accepted_per_position, self.verified_counts, strict=True)
        return tuple(accepted / verified if verified else 0.0 for accepted, verified in pairs)

    @property
    def verified_counts(self) -> tuple[int, ...]:
        """Number of drafts whose token at each position of `accepted_per_position` was verified."""
        num_positions = len(self.accepted_per_position)
        if not self.verified_per_position:
            return (self.num_drafts,) * num_positions
        return (self.verified_per_position + (0,) * num_positions)[:num_positions]

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted draft tokens / drafted tokens; None without drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        # With a smaller K, later positions count as never accepted.
        if not isinstance(other, SpeculationStats):
            return NotImplemented

        def add(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a + b for a, b in zip_longest(mine, theirs, fillvalue=0))

        has_unverified = self.verified_per_position or other.verified_per_position
        return SpeculationStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            accepted_per_position=add(self.accepted_per_position, other.accepted_per_position),
            num_lookup_tokens=self.num_lookup_tokens + other.num_lookup_tokens,
            num_dropped_tokens=self.num_dropped_tokens + other.num_dropped_tokens,
            verified_per_position=add(self.verified_counts, other.verified_counts) if has_unverified else (),
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "accepted_per_position": list(self.accepted_per_position),
            **({"num_lookup_tokens": self.num_lookup_tokens} if self.num_lookup_tokens else {}),
            **({"num_dropped_tokens": self.num_dropped_tokens} if self.num_dropped_tokens else {}),
            **({"verified_per_position": list(self.verified_per_position)} if self.verified_per_position else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Inverse of `to_dict`. Missing, unknown or invalid counts raise ValueError."""
        required = {"num_drafts", "num_draft_tokens", "accepted_per_position"}
        optional = {"num_lookup_tokens", "num_dropped_tokens", "verified_per_position"}
        if not isinstance(data, Mapping) or not required <= set(data) <= required | optional:
            raise ValueError(f"speculation counts must have the keys {sorted(required)}, got {data!r}")
        counts = dict(data)
        for name in ("accepted_per_position", "verified_per_position"):
            per_position = counts.get(name) or ()
            if not isinstance(per_position, list | tuple):
                raise ValueError(f"{name} must be a list of counts, got {per_position!r}")
            counts[name] = tuple(per_position)
        return cls(**counts)  # type: ignore[arg-type]  # __post_init__ checks


def break_even_acceptance_length(step_s_with: float, step_s_without: float) -> float:
    """Return the acceptance length at which a drafter costs as much as it saves.

    A step with the drafter yields the acceptance length in tokens, a step without it yields 1.

    >>> break_even_acceptance_length(0.039, 0.026)
    1.5
    """
    if not (step_s_with > 0 and step_s_without > 0):
        raise ValueError(f"step times must be positive, got {step_s_with} and {step_s_without}")
    return step_s_with / step_s_without


def drafter_warning(length: float | None, *, break_even: float | None = None) -> str | None:
    """Return a warning if the drafter costs more than it saves, else None.

    `length` is None without drafts. Without a measured `break_even`, `NEVER_PAYS_BELOW` applies.
    """
    if length is None:
        return None
    if break_even is not None and length < break_even:
        return (
            f"The drafter costs more than it saves: {length:.2f} tokens per step, but this hardware needs "
            f"{break_even:.2f} at this concurrency. Use --drafter none, or a smaller --num-speculative-tokens."
        )
    if length < NEVER_PAYS_BELOW:
        return (
            f"The drafter costs more than it saves: {length:.2f} tokens per step, so nearly all drafts are rejected. "
            "Check that the drafter was trained for this model and this kind of prompt, or use --drafter none."
        )
    return None


def sources_note(stats: SpeculationStats) -> str | None:
    """Return a sentence about accepted tokens by source (prompt lookup or head), or None without a prompt lookup."""
    looked_up, accepted = stats.num_lookup_tokens, stats.num_accepted_tokens
    if not looked_up:
        return None
    verb = "was" if looked_up == 1 else "were"
    return (
        f"Of {accepted:,} accepted draft tokens, {looked_up:,} {verb} found by the prompt lookup; "
        f"the other {accepted - looked_up:,} are the head's."
    )
