"""What a catalog card says about a model, and what makes one invalid.

A card is a YAML file of facts. Every group of numbers names its source; what could not be confirmed is null,
never a guess. It knows nothing of files on disk or of engines.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Method = Literal["peagle", "eagle3", "none"]
Platform = Literal["cpu", "cuda"]
RESERVED_NAMES = ("add",)  # `peagle models add` is a command


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(_Strict):
    """Where the target's weights come from.

    Attributes:
        kind: inside a Python package, on the Hugging Face hub, or in a folder of the user's.
        id: the distribution's name, the hub id, or the folder's absolute path.
        revision: version or commit; None is the latest.
    """

    kind: Literal["package", "huggingface", "folder"]
    id: str
    revision: str | None = None


class Licence(_Strict):
    """The licence and where it is stated."""

    name: str
    source: str


class Architecture(_Strict):
    """The numbers of a model's `config.json`; None where not confirmed."""

    family: str
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    num_parameters: int | None
    context_tokens: int | None
    source: str


class PrecisionFacts(_Strict):
    """Precisions that run this model.

    Attributes:
        options: values of `--precision` that make sense.
        default: the one used when the user names none.
        native_quantization: how the checkpoint is quantised as published, such as mxfp4.
        source: who says so.
    """

    options: list[Literal["bf16", "fp8", "float32", "float16"]]
    default: Literal["auto", "bf16", "fp8", "float32", "float16"] = "auto"
    native_quantization: str | None = None
    source: str


class SmallestHardware(_Strict):
    """The least that holds the model, in words, and who says so."""

    description: str
    source: str


class HeadCard(_Strict):
    """A drafter head for the model.

    Attributes:
        kind: in this package, on the Hugging Face hub, or in a folder of the user's.
        id: folder name under `heads/`, hub id, or absolute path; None where none is published.
        published: anyone can download it. False says so plainly, with the reason in `note`.
        long_context_id: the variant for long prompts.
        licence: None where not confirmed.
        max_speculative_tokens: the depth that it was trained to; None where not confirmed.
        note: what a user should know before choosing it.
        source: who says so.
    """

    kind: Literal["shipped", "huggingface", "folder"]
    id: str | None = None
    published: bool = True
    long_context_id: str | None = None
    licence: str | None = None
    max_speculative_tokens: int | None = None
    note: str = ""
    source: str

    @model_validator(mode="after")
    def _published_has_an_id(self) -> Self:
        if self.published and not self.id:
            raise ValueError("a published head needs an id")
        return self


class SpeculationRow(_Strict):
    """What to draft with up to a concurrency, measured on one kind of hardware.

    Attributes:
        platform: the hardware that the figure holds for.
        max_concurrency: requests decoded at once, at most; None is any number.
        method: "none" where drafting costs more than it saves.
        num_speculative_tokens: K; 0 with "none".
        source: the measurement: figure, hardware, who.
    """

    platform: Platform
    max_concurrency: int | None = Field(default=None, gt=0)
    method: Method
    num_speculative_tokens: int = Field(ge=0)
    source: str

    @model_validator(mode="after")
    def _k_follows_method(self) -> Self:
        if (self.method == "none") != (self.num_speculative_tokens == 0):
            raise ValueError("num_speculative_tokens is 0 exactly with method none")
        return self


class ModelCard(_Strict):
    """One model of the catalog."""

    name: str
    title: str
    summary: str
    source: Source
    licence: Licence
    architecture: Architecture
    precision: PrecisionFacts
    smallest_hardware: SmallestHardware
    heads: dict[Literal["peagle", "eagle3"], HeadCard] = {}
    speculation: list[SpeculationRow] = []

    @property
    def context_tokens(self) -> int | None:
        """The model's own context."""
        return self.architecture.context_tokens

    @model_validator(mode="after")
    def _name_is_free(self) -> Self:
        if self.name in RESERVED_NAMES:
            raise ValueError(f"a model cannot be called {self.name!r}: `peagle models {self.name}` is a command")
        return self

    @model_validator(mode="after")
    def _rows_are_ordered_and_have_heads(self) -> Self:
        for platform in ("cpu", "cuda"):
            limits = [row.max_concurrency for row in self.speculation if row.platform == platform]
            numbers = [float("inf") if limit is None else limit for limit in limits]
            if numbers != sorted(set(numbers)):
                raise ValueError(f"speculation: rows for {platform} must ascend in max_concurrency, the open one last")
        for row in self.speculation:
            if row.method != "none" and row.method not in self.heads:
                raise ValueError(f"speculation: no head {row.method!r} in heads")
        return self

    def speculation_for(self, concurrency: int, platform: Platform | None = None) -> SpeculationRow | None:
        """The row for a concurrency, None where nothing was measured for it.

        Args:
            concurrency: requests decoded at once.
            platform: the hardware; None takes the rows of whichever platform comes first on the card.
        """
        if platform is None and self.speculation:
            platform = self.speculation[0].platform
        for row in self.speculation:
            if row.platform == platform and (row.max_concurrency is None or concurrency <= row.max_concurrency):
                return row
        return None
