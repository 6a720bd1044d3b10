"""One measured figure among many: a method at a K and a concurrency.

Benchmarks write it, plans and profiles read it.

A cell may come from a file that anyone wrote, so it is checked. It knows nothing of how it was measured.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS
from peagle.errors import ConfigError

NONE = "none"
METHODS = (NONE, *DRAFT_METHODS, *LOOKUP_METHODS)
METHOD_NAMES = {
    NONE: "no speculation", "eagle3": "EAGLE-3", "peagle": "P-EAGLE", "ngram": "n-gram", "suffix": "suffix",
}  # fmt: skip


class Cell(BaseModel):
    """A method, K and concurrency, and what came of it.

    Keys that are not known here are passed over.

    Attributes:
        method: one of `METHODS`.
        k: draft tokens a step; 0 without speculation.
        concurrency: requests in the engine at once.
        output_tokens_per_s: of one engine.
        spread: range of the repeats over their median; None for one repeat.
        tpot_s, ttft_s: percentiles by name ("p50", "p95", "p99"): time per output token, and to the first one.
        acceptance_length: tokens that a verify step yields; None without speculation, or where not known.
        start_s: what an engine took to start.
        num_responses, num_output_tokens: what was measured; their quotient is a response's mean length.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    method: str
    k: int = Field(ge=0)
    concurrency: int = Field(ge=1)
    output_tokens_per_s: float = Field(gt=0)
    spread: float | None = None
    repeats: int = Field(1, ge=1)
    tpot_s: dict[str, float] | None = None
    ttft_s: dict[str, float] | None = None
    step_s: float | None = None
    acceptance_length: float | None = Field(None, ge=1)
    tokens_per_usd: float | None = None
    start_s: float | None = Field(None, ge=0)
    num_responses: int | None = None
    num_output_tokens: int | None = None

    @field_validator("method")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"{value!r} is not one of {', '.join(METHODS)}")
        return value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if (self.method == NONE) != (self.k == 0):
            raise ValueError("k is 0 exactly with method none")
        if self.acceptance_length is not None and self.acceptance_length > self.k + 1:
            raise ValueError(
                f"acceptance_length {self.acceptance_length:g}: a step yields at most k + 1 = {self.k + 1}"
            )
        return self

    @property
    def drafts(self) -> bool:
        """Whether it speculates."""
        return self.method != NONE

    @property
    def drafts_each_step(self) -> bool:
        """Whether its speed is in proportion to its acceptance length.

        With a lookup many steps have no draft.
        """
        return self.drafts and self.method not in LOOKUP_METHODS

    def is_within(self, *, max_tpot_ms: float | None, max_ttft_ms: float | None) -> bool:
        """Whether its p95 latencies keep these limits; without latencies it keeps none."""
        limits = ((max_tpot_ms, self.tpot_s), (max_ttft_ms, self.ttft_s))
        return all(
            limit is None or (found is not None and "p95" in found and found["p95"] * 1000 <= limit)
            for limit, found in limits
        )

    @property
    def response_tokens(self) -> float | None:
        """Mean length of a response; None where it was not kept."""
        return self.num_output_tokens / self.num_responses if self.num_responses and self.num_output_tokens else None


def method_label(method: str, k: int) -> str:
    """A method and its K for people; without drafts there is no K."""
    return f"{METHOD_NAMES[method]} K={k}" if k else METHOD_NAMES[method]


def read_cells(entries: Any, where: str) -> list[Cell]:
    """The cells of a file.

    Args:
        where: the file, for messages.

    Raises:
        ConfigError: it is no list, it is empty, or an entry is not a cell; the first fault is named.
    """
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: cells must be a list with a measurement in it", hint="docs/planning.md shows one")
    return [_cell(entry, f"{where}, cell {number}") for number, entry in enumerate(entries, start=1)]


def _cell(entry: Any, where: str) -> Cell:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: it must hold keys and values", hint="docs/planning.md shows one")
    try:
        return Cell(**entry)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{where}: {f'{name}: ' if name else ''}{message}", hint="see docs/planning.md for the keys of a cell"
        ) from None
