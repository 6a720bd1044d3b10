"""A measured cell: a method with K at a concurrency. Benchmarks write cells; plans and profiles read them."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS
from peagle.errors import ConfigError

NONE = "none"
METHODS = (NONE, *DRAFT_METHODS, *LOOKUP_METHODS)
METHOD_NAMES = {
    NONE: "no speculation", "eagle3": "EAGLE-3", "peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark",
    "ngram": "n-gram", "suffix": "suffix",
}  # fmt: skip


class Cell(BaseModel):
    """A measured cell. Unknown keys are ignored.

    Attributes:
        k: draft tokens per step; 0 without speculation.
        spread: range of the repeats over their median; None for one repeat.
        tpot_s, ttft_s: percentiles by name ("p50", "p95", "p99").
        acceptance_length: tokens per verification step; None without speculation, or if unknown.
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
    def _check_method(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"{value!r} is not one of {', '.join(METHODS)}")
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if (self.method == NONE) != (self.k == 0):
            raise ValueError("k must be 0 with method none, and only then")
        if self.acceptance_length is not None and self.acceptance_length > self.k + 1:
            raise ValueError(
                f"acceptance_length {self.acceptance_length:g}: a step yields at most k + 1 = {self.k + 1}"
            )
        return self

    @property
    def has_drafter(self) -> bool:
        return self.method != NONE

    @property
    def drafts_each_step(self) -> bool:
        """Whether the speed is proportional to the acceptance length; lookups skip many steps."""
        return self.has_drafter and self.method not in LOOKUP_METHODS

    def is_within(self, *, max_tpot_ms: float | None, max_ttft_ms: float | None) -> bool:
        limits = ((max_tpot_ms, self.tpot_s), (max_ttft_ms, self.ttft_s))
        return all(
            limit is None or (times is not None and "p95" in times and times["p95"] * 1000 <= limit)
            for limit, times in limits
        )

    @property
    def response_tokens(self) -> float | None:
        return self.num_output_tokens / self.num_responses if self.num_responses and self.num_output_tokens else None


def method_label(method: str, k: int) -> str:
    return f"{METHOD_NAMES[method]} K={k}" if k else METHOD_NAMES[method]


def read_cells(entries: Any, where: str) -> list[Cell]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: cells must be a non-empty list", hint="docs/planning.md shows an example")
    cells = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}, cell {number}: must be a mapping", hint="docs/planning.md shows an example")
        try:
            cells.append(Cell(**entry))
        except ValidationError as error:
            hint = "see docs/planning.md for the keys of a cell"
            raise ConfigError(f"{where}, cell {number}: {describe_invalid(error)}", hint=hint) from None
    return cells


def describe_invalid(error: ValidationError) -> str:
    """Return the name of the first invalid key, and why it is invalid."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
