"""The keys of every measuring command: target, data, sampling, engine.

A command's own configuration adds what it varies (drafters, K, concurrency). It knows no engine.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from peagle.humaneval import HUMANEVAL
from peagle.requests.prompts import PromptKeys
from peagle.storage import on_disk


class MeasurementKeys(PromptKeys):
    """The keys of any measurement. A description is the help text of its flag."""

    model: str = Field("smollm2-135m", description="catalog name, folder, or Hugging Face id of the target")
    precision: Literal["auto", "bf16", "fp8", "float16", "float32"] = Field(
        "auto", description="weights and KV cache of the target"
    )

    dataset: str = Field(HUMANEVAL, description="humaneval, or a corpus of prompts as generate reads it")
    limit: int | None = Field(None, ge=1, description="take only the first rows")
    output: Path | None = Field(None, description="folder of results; a measurement there goes on")

    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy, and exactly repeatable")
    max_tokens: int = Field(256, ge=1, description="longest response in tokens")
    max_model_len: int | None = Field(None, ge=16, description="context in tokens; default: the model's own")
    tensor_parallel_size: int = Field(1, ge=1, description="accelerators that share the engine's layers")
    enforce_eager: bool = Field(False, description="do not compile: starts sooner, decodes slower")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="memory of the KV cache on CPU; default: from the machine's"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of an accelerator's memory to use")

    _on_disk = field_validator("output", mode="before")(on_disk)

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, by the names that engines know."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}


def whole_numbers(value: Any, name: str, largest: int) -> list[int]:
    """Whole numbers from "3,5" and from repeated flags, ascending, each once.

    Raises:
        ValueError: one of them is no whole number from 1 to `largest`.

    >>> whole_numbers(["7,3", "3"], "K", 32)
    [3, 7]
    """
    parts = value if isinstance(value, list) else [value]
    words = [word for part in parts for word in str(part).split(",")]
    if not all(word.strip().isdecimal() and 1 <= int(word) <= largest for word in words):
        raise ValueError(f"{name} must be whole numbers from 1 to {largest}, separated by commas")
    return sorted({int(word) for word in words})
