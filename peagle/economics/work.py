"""Committed work: counts, seconds and dollars that add up."""

from dataclasses import dataclass
from typing import Self

from peagle.economics.usage import UnitUsage

COUNTS = ("num_requests", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
"""Counts in a statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Committed work; it adds up with `+`.

    Attributes:
        busy_s: its share of the engine's busy seconds.
        request_s: seconds of its requests from start to end; `request_s / busy_s` is the concurrency. 0 if unknown.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    busy_s: float = 0.0
    request_s: float = 0.0
    usd: float = 0.0

    @classmethod
    def of(cls, usage: UnitUsage, usd: float, *, request_s: float = 0.0) -> Self:
        return cls(
            num_requests=usage.num_rows + usage.num_failed_rows,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            num_drafts=usage.speculation.num_drafts,
            num_accepted_tokens=usage.speculation.num_accepted_tokens,
            busy_s=usage.busy_s,
            request_s=request_s,
            usd=usd,
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})
