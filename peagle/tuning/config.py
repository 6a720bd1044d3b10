"""Options of `peagle tune`, for YAML and the command line."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from peagle.bench.config import MAX_CONCURRENCY, DraftingOptions, MeasurementOptions, whole_numbers
from peagle.economics.price_options import PriceOptions
from peagle.engine.precision import PRECISIONS
from peagle.engine.spec import DRAFT_METHODS, Verify
from peagle.profiles.measurements import NONE

METHODS = (NONE, *DRAFT_METHODS)
AUTO = "auto"


class TuneConfig(PriceOptions, MeasurementOptions, DraftingOptions):
    objective: Literal["tokens-per-dollar", "throughput"] = Field(
        "tokens-per-dollar",
        description="maximise output tokens per dollar, or output tokens/s of an engine",
    )
    max_tpot_ms: float | None = Field(None, gt=0, description="limit: p95 of a request's time per output token")
    max_ttft_ms: float | None = Field(None, gt=0, description="limit: p95 of a request's time to its first token")
    time_budget_s: float = Field(1800, gt=0, description="total engine seconds, including starts and earlier commands")

    methods: list[str] = Field(
        default_factory=lambda: [NONE, "peagle"],
        min_length=1,
        description=f"any of {', '.join(METHODS)}; none is always included; default: none,peagle",
    )
    max_num_seqs: list[int] | None = Field(
        None, description="concurrent requests, as 1,4,16; default: 1,4,16 on CPUs, 8,32,128 on GPUs"
    )
    max_num_batched_tokens: list[str] = Field(
        default_factory=lambda: [AUTO],
        description="token slots per step, as auto,4096; auto depends on K and concurrency; default: auto",
    )
    precision: list[str] = Field(  # type: ignore[assignment]  # a list, unlike in a benchmark
        default_factory=lambda: [AUTO], description="weights and KV cache of the target, as bf16,fp8; default: auto"
    )
    verify: Verify = Field(
        "auto", description="auto: K is a maximum, and the engine chooses (CPUs); all: compare each K"
    )
    requests_per_slot: int = Field(3, ge=1, description="prompts per pass: N x concurrency, at least 6")
    output: Path | None = Field(
        None, description="folder of results; an existing tuning continues; default: runs/tune/FINGERPRINT"
    )
    profile_output: Path | None = Field(None, description="file of the profile; default: OUTPUT/profile.yaml")

    @field_validator("methods", mode="before")
    @classmethod
    def _split_methods(cls, value: Any) -> list[str]:
        return list(dict.fromkeys([NONE, *_valid_words(value, METHODS)]))

    @field_validator("precision", mode="before")
    @classmethod
    def _split_precisions(cls, value: Any) -> list[str]:
        return _valid_words(value, PRECISIONS)

    @field_validator("max_num_seqs", mode="before")
    @classmethod
    def _split_sizes(cls, value: Any) -> list[int] | None:
        return None if value is None else whole_numbers(value, "max_num_seqs", MAX_CONCURRENCY)

    @field_validator("max_num_batched_tokens", mode="before")
    @classmethod
    def _split_slots(cls, value: Any) -> list[str]:
        words = [word.strip() for part in _parts(value) for word in str(part).split(",")]
        if not all(word == AUTO or (word.isdecimal() and int(word) > 0) for word in words):
            raise ValueError("max_num_batched_tokens is auto or whole numbers, separated by commas")
        return list(dict.fromkeys(words))

    def goal(self) -> dict[str, Any]:
        """Return the goal, which may change without new measurements."""
        return {"objective": self.objective, "max_tpot_ms": self.max_tpot_ms, "max_ttft_ms": self.max_ttft_ms}


def _parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _valid_words(value: Any, valid: tuple[str, ...]) -> list[str]:
    words = [word.strip() for part in _parts(value) for word in str(part).split(",")]
    if invalid := [word for word in words if word not in valid]:
        raise ValueError(f"{invalid[0]!r} is not one of {', '.join(valid)}")
    return list(dict.fromkeys(words))
