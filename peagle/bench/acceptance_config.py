"""The keys of an evaluation, the same in YAML and on the command line."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from peagle.bench.options import MeasurementKeys, whole_numbers

MAX_K = 32


class EvaluateConfig(MeasurementKeys):
    """One evaluation.

    A description is the help text of its flag; an unknown key is an error.
    """

    drafter: list[str] = Field(
        default_factory=lambda: ["auto"],
        min_length=1,
        description="auto (the catalog's advice), peagle, eagle3, a folder or a Hugging Face id",
    )
    num_speculative_tokens: list[int] | None = Field(
        None, description="draft tokens a step (K), as 3 or 3,5,7; default: each drafter's own"
    )
    category_column: str = Field("category", description="column to break acceptance down by, where the data has it")
    output: Path | None = Field(
        None, description="folder of results; an evaluation there goes on; default: runs/evaluate/FINGERPRINT"
    )
    concurrency: int = Field(1, ge=1, description="requests in the engine at once")

    @field_validator("drafter", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("drafter")
    @classmethod
    def _drafts(cls, names: list[str]) -> list[str]:
        if "none" in names:
            raise ValueError(
                "none drafts nothing, so there is nothing to accept (`peagle generate --drafter none` times the target)"
            )
        return names

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return None if value is None else whole_numbers(value, "K", MAX_K)
