"""Options of `peagle plan`, for YAML and the command line."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


class PlanConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = Field(
        None, description="catalog name or hub id of a model with published speeds, if you measured nothing yourself"
    )
    measured: list[Path] = Field(
        default_factory=list,
        description="report.json of `peagle bench`, or a sweep file (docs/planning.md); default: published speeds of "
        "--model",
    )
    tokens: float | None = Field(None, gt=0, description="output tokens to generate: 2e9, 500M, 1.5B")
    within: float | None = Field(
        None, gt=0, description="deadline for --tokens: 24h, 2d12h; default: the time of one machine"
    )
    tokens_per_s: float | None = Field(None, gt=0, description="output tokens/s to sustain, instead of --tokens")
    max_tpot_ms: float | None = Field(None, gt=0, description="limit: p95 of a request's time per output token")
    max_ttft_ms: float | None = Field(None, gt=0, description="limit: p95 of a request's time to its first token")
    max_machines: int | None = Field(None, ge=1, description="maximum number of machines")
    target_utilisation: float = Field(
        0.8, gt=0, le=1, description="fraction of the measured tokens/s to use for a service"
    )

    instance_types: list[str] = Field(
        default_factory=list,
        description="instance types to price instead of the measured ones; with the same accelerator",
    )
    market: Literal["both", "on_demand", "spot"] = Field("both", description="which prices to compare")
    provider: str | None = Field(None, description="cloud provider, if several have the instance type")
    region: str | None = Field(None, description="region, if the price depends on it")
    prices: Path | None = Field(None, description="CSV of prices that adds to or replaces rows of the table")

    spot_interruptions_per_h: float = Field(0.05, ge=0, description="assumed interruptions of a spot machine per hour")
    failures_per_h: float = Field(0.0, ge=0, description="assumed failures of a machine per hour")
    provision_s: float = Field(180, ge=0, description="assumed seconds to provision machines")
    replace_s: float = Field(300, ge=0, description="assumed seconds to replace a lost machine")
    start_s: float | None = Field(None, ge=0, description="seconds to start an engine; default: as measured, or 300")
    lost_s: float | None = Field(
        None, ge=0, description="engine seconds lost per interruption; default: half of the open rows"
    )

    @field_validator("measured", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @field_validator("instance_types", mode="before")
    @classmethod
    def _split_types(cls, value: Any) -> list[str]:
        parts = value if isinstance(value, list) else [value]
        return [word.strip() for part in parts for word in str(part).split(",") if word.strip()]

    @field_validator("tokens", "tokens_per_s", mode="before")
    @classmethod
    def _parse_amount(cls, value: Any) -> Any:
        return parse_amount(value) if isinstance(value, str) else value

    @field_validator("within", mode="before")
    @classmethod
    def _parse_duration(cls, value: Any) -> Any:
        return parse_duration_s(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if not self.measured and self.model is None:
            raise ValueError("set model, to use its published speeds, or measured, to use your own")
        if (self.tokens is None) == (self.tokens_per_s is None):
            raise ValueError("set either tokens (a job) or tokens_per_s (a service)")
        if self.within is not None and self.tokens is None:
            raise ValueError("within requires tokens: a service has no end")
        if self.tokens is not None and "target_utilisation" in self.model_fields_set:
            raise ValueError("target_utilisation requires tokens_per_s: a job always has waiting requests")
        return self


def parse_amount(text: str) -> float:
    """Parse a number of tokens.

    >>> parse_amount("1.5B"), parse_amount("2e9"), parse_amount("500 M")
    (1500000000.0, 2000000000.0, 500000000.0)
    """
    match = _AMOUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError("not a number of tokens, such as 2e9, 500M or 1.5B")
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match.group(2).lower()]
    return float(match.group(1)) * scale


def parse_duration_s(text: str) -> float:
    """Parse a duration into seconds.

    >>> parse_duration_s("2d12h"), parse_duration_s("90m"), parse_duration_s("1.5h")
    (216000.0, 5400.0, 5400.0)
    """
    match = _DURATION.fullmatch(text.strip())
    if not text.strip() or match is None:
        raise ValueError("not a duration, such as 24h, 2d12h or 90m")
    return sum(float(part or 0) * unit_s for part, unit_s in zip(match.groups(), (86400, 3600, 60, 1), strict=True))
