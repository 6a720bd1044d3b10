"""What a user can ask of an evaluation: one flat set of keys, the same in YAML and on the command line."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from peagle.prompting import PromptKeys

HUMANEVAL = "humaneval"
MAX_K = 32


class EvaluateConfig(PromptKeys):
    """One evaluation. A description is the help text of its flag; an unknown key is an error."""

    model: str = Field("smollm2-135m", description="catalog name, folder, or Hugging Face id of the target")
    drafter: list[str] = Field(
        default_factory=lambda: ["auto"],
        min_length=1,
        description="auto (the catalog's advice), peagle, eagle3, a folder or a Hugging Face id",
    )
    num_speculative_tokens: list[int] | None = Field(
        None, description="draft tokens a step (K), as 3 or 3,5,7; default: each drafter's own"
    )
    precision: Literal["auto", "bf16", "fp8", "float16", "float32"] = Field(
        "auto", description="weights and KV cache of the target"
    )

    dataset: str = Field(HUMANEVAL, description="humaneval, or a JSONL or Parquet file of prompts")
    category_column: str = Field("category", description="column to break acceptance down by, where the data has it")
    limit: int | None = Field(None, ge=1, description="take only the first rows")
    output: Path | None = Field(
        None, description="folder of results; an evaluation there goes on; default: runs/evaluate/FINGERPRINT"
    )

    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy, and exactly repeatable")
    max_tokens: int = Field(256, ge=1, description="longest response in tokens")
    concurrency: int = Field(1, ge=1, description="requests in the engine at once")
    max_model_len: int | None = Field(None, ge=16, description="context in tokens; default: the model's own")
    tensor_parallel_size: int = Field(1, ge=1, description="accelerators that share the engine's layers")
    enforce_eager: bool = Field(False, description="do not compile: starts sooner, decodes slower")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="memory of the KV cache on CPU; default: from the machine's"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of an accelerator's memory to use")

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
        """K from "3,5" and from a flag given several times, in ascending order, each once."""
        if value is None:
            return None
        parts = value if isinstance(value, list) else [value]
        words = [word for part in parts for word in str(part).split(",")]
        if not all(word.strip().isdecimal() and 1 <= int(word) <= MAX_K for word in words):
            raise ValueError(f"K must be whole numbers from 1 to {MAX_K}, separated by commas")
        return sorted({int(word) for word in words})

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, by the names that engines know."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}
