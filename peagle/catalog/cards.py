"""The catalog's cards: YAML files with facts about models, each with its source.

Cards ship with peagle. Cards in `$PEAGLE_HOME/models` are added, and replace shipped cards of the same name.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from peagle.catalog.folders import peagle_home
from peagle.engine.spec import DraftMethod
from peagle.errors import CatalogError, did_you_mean
from peagle.private import user_path
from peagle.speculation import break_even_acceptance_length

Method = DraftMethod | Literal["none"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Deployment(Strict):
    where: str
    instance_type: str
    num_speculative_tokens: int = Field(gt=0)
    source: str


class PublishedSpeeds(Strict):
    """Output tokens/s of a method and K, one value per concurrency of the table."""

    method: Method
    num_speculative_tokens: int = Field(ge=0)
    output_tokens_per_s: list[float] = Field(min_length=1)

    @model_validator(mode="after")
    def _k_matches_method(self) -> Self:
        if (self.method == "none") != (self.num_speculative_tokens == 0):
            raise ValueError("num_speculative_tokens must be 0 with method none, and above 0 with other methods")
        if min(self.output_tokens_per_s) <= 0:
            raise ValueError("output_tokens_per_s must be positive")
        return self


class PublishedTable(Strict):
    """Published output tokens/s of one engine by method, K and concurrency.

    Attributes:
        accelerator: name in the price table.
        precision: the target's precision, a value of `--precision`.
    """

    dataset: str
    accelerator: str
    num_accelerators: int = Field(gt=0)
    precision: Literal["bf16", "fp8"]
    concurrency: list[int] = Field(min_length=1)
    speeds: list[PublishedSpeeds] = Field(min_length=1)
    source: str
    url: str

    @model_validator(mode="after")
    def _check_rows_and_concurrency(self) -> Self:
        if self.concurrency != sorted(set(self.concurrency)) or self.concurrency[0] < 1:
            raise ValueError("concurrency must ascend from 1 or more")
        if any(len(row.output_tokens_per_s) != len(self.concurrency) for row in self.speeds):
            raise ValueError("output_tokens_per_s must have a value per concurrency")
        if len({(row.method, row.num_speculative_tokens) for row in self.speeds}) < len(self.speeds):
            raise ValueError("speeds must have each method and K once")
        return self

    @property
    def label(self) -> str:
        """The origin that is shown with the table's values, such as "published, one B200"."""
        count = "one" if self.num_accelerators == 1 else str(self.num_accelerators)
        return f"published, {count} {self.accelerator}"

    def best(self, method: Method) -> list[PublishedSpeeds]:
        """Return, for each concurrency, the row with the method's fastest K; empty if the table lacks the method."""
        rows = [row for row in self.speeds if row.method == method]
        columns = range(len(self.concurrency) if rows else 0)
        return [max(rows, key=lambda row: row.output_tokens_per_s[column]) for column in columns]

    def gains(self, method: Method, *, over: Method) -> list[float]:
        """Return the best speed of `method` divided by that of `over`, by concurrency; empty if one is missing."""
        pairs = zip(self.best(method), self.best(over), strict=False)  # either may be empty
        return [row.output_tokens_per_s[i] / base.output_tokens_per_s[i] for i, (row, base) in enumerate(pairs)]


class StepRow(Strict):
    """Step times of one method and K.

    Attributes:
        step_ms: one value per concurrency, including drafting and verification.
        spread: range of the repeats divided by their median, per concurrency; empty if unknown.
    """

    method: Method
    num_speculative_tokens: int = Field(ge=0)
    step_ms: list[float] = Field(min_length=1)
    spread: list[float] = Field(default_factory=list)


class StepTable(Strict):
    """Step times of compiled engines with the card's heads on one kind of hardware, by method, K and concurrency.

    Attributes:
        hardware: from `Hardware.describe`; empty if unknown.
    """

    platform: Literal["cpu", "cuda"]
    precision: str
    hardware: str = ""
    source: str
    concurrency: list[int] = Field(min_length=1)
    rows: list[StepRow]

    @model_validator(mode="after")
    def _check_rows_and_concurrency(self) -> Self:
        if any(len(row.step_ms) != len(self.concurrency) for row in self.rows):
            raise ValueError("steps: each row must have a time per concurrency")
        if any(len(row.spread) not in (0, len(self.concurrency)) for row in self.rows):
            raise ValueError("steps: spread must be empty or have a value per concurrency")
        if min(self.concurrency) < 1 or any(ms <= 0 for row in self.rows for ms in row.step_ms):
            raise ValueError("steps: times must be above zero, and concurrencies at least 1")
        if self.concurrency != sorted(set(self.concurrency)):
            raise ValueError("steps: concurrencies must ascend")
        configurations = [(row.method, row.num_speculative_tokens) for row in self.rows]
        if configurations.count(("none", 0)) != 1 or len(set(configurations)) < len(configurations):
            raise ValueError("steps: one row must have method none and K=0, and no two rows the same method and K")
        return self

    def break_even(self, method: str, k: int) -> dict[int, float]:
        """Return the break-even acceptance length by concurrency; empty if unknown."""
        row = self.row(method, k)
        if row is None:
            return {}
        lengths = map(break_even_acceptance_length, row.step_ms, self.row_without_drafter.step_ms)
        return dict(zip(self.concurrency, lengths, strict=True))

    @property
    def row_without_drafter(self) -> StepRow:
        return next(row for row in self.rows if row.method == "none")

    def row(self, method: str, k: int) -> StepRow | None:
        """Return the row of a method and K, interpolated between measured K; None outside their range."""
        measured = {row.num_speculative_tokens: row for row in self.rows if row.method == method}
        if k in measured:
            return measured[k]
        for below, above in pairwise(sorted(measured)):
            if below < k < above:
                low, high, share = measured[below], measured[above], (k - below) / (above - below)
                step_ms = [a + share * (b - a) for a, b in zip(low.step_ms, high.step_ms, strict=True)]
                spread = list(map(max, low.spread, high.spread))
                return StepRow(method=low.method, num_speculative_tokens=k, step_ms=step_ms, spread=spread)
        return None


Platform = Literal["cpu", "cuda"]


class Source(Strict):
    """The source of the target's weights: a Python package, the Hugging Face hub, or a local folder."""

    kind: Literal["package", "huggingface", "folder"]
    id: str
    revision: str | None = None


class Licence(Strict):
    name: str
    source: str


class ArchitectureFacts(Strict):
    family: str
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    num_parameters: int | None
    context_tokens: int | None
    source: str


class PrecisionFacts(Strict):
    """Precisions that run this model, and the quantisation of the published checkpoint, such as mxfp4."""

    options: list[Literal["bf16", "fp8", "int8", "float32", "float16"]]
    default: Literal["auto", "bf16", "fp8", "float32", "float16"] = "auto"
    native_quantization: str | None = None
    source: str


class SmallestHardware(Strict):
    description: str
    source: str


class HeadCard(Strict):
    """A drafter head for the model.

    Attributes:
        kind: where the head is: in this package, on the Hugging Face hub, or in a local folder.
        id: folder name under `heads/`, hub id, or absolute path; None if the head is not published.
        published: whether the head can be downloaded; otherwise `note` has the reason.
        long_context_id: id of the variant for long prompts.
        max_speculative_tokens: the depth that the head was trained for; None if not confirmed.
    """

    kind: Literal["shipped", "huggingface", "folder"]
    id: str | None = None
    published: bool = True
    long_context_id: str | None = None
    licence: str | None = None
    max_speculative_tokens: int | None = None
    deployments: list[Deployment] = Field(default_factory=list)
    note: str = ""
    source: str

    @model_validator(mode="after")
    def _published_has_an_id(self) -> Self:
        if self.published and not self.id:
            raise ValueError("a published head requires an id")
        return self


class SpeculationRow(Strict):
    """The recommended method and K on a platform, up to `max_concurrency`; None is unlimited."""

    platform: Platform
    max_concurrency: int | None = Field(default=None, gt=0)
    method: Method
    num_speculative_tokens: int = Field(ge=0)
    source: str

    @model_validator(mode="after")
    def _k_follows_method(self) -> Self:
        if (self.method == "none") != (self.num_speculative_tokens == 0):
            raise ValueError("num_speculative_tokens must be 0 with method none, and above 0 with other methods")
        return self


class ModelCard(Strict):
    """One model of the catalog."""

    name: str
    title: str
    summary: str
    source: Source
    licence: Licence
    architecture: ArchitectureFacts
    precision: PrecisionFacts
    smallest_hardware: SmallestHardware
    heads: dict[DraftMethod, HeadCard] = Field(default_factory=dict)
    speculation: list[SpeculationRow] = Field(default_factory=list)
    published: list[PublishedTable] = Field(default_factory=list)
    steps: list[StepTable] = Field(default_factory=list)

    @property
    def context_tokens(self) -> int | None:
        return self.architecture.context_tokens

    @model_validator(mode="after")
    def _check_speculation_and_name(self) -> Self:
        if self.name == "add":
            raise ValueError(f"the name {self.name!r} is reserved: `peagle models {self.name}` is a command")
        for platform in ("cpu", "cuda"):
            limits = [row.max_concurrency for row in self.speculation if row.platform == platform]
            limits_or_inf = [float("inf") if limit is None else limit for limit in limits]
            if limits_or_inf != sorted(set(limits_or_inf)):
                raise ValueError(
                    f"speculation: rows for {platform} must ascend in max_concurrency, with the unlimited row last"
                )
        for row in self.speculation:
            if row.method != "none" and row.method not in self.heads:
                raise ValueError(f"speculation: no head {row.method!r} in heads")
        return self

    def speculation_for(self, concurrency: int, platform: Platform | None = None) -> SpeculationRow | None:
        """Return the row for a concurrency, if any. The default platform is that of the first row."""
        if platform is None and self.speculation:
            platform = self.speculation[0].platform
        for row in self.speculation:
            if row.platform == platform and (row.max_concurrency is None or concurrency <= row.max_concurrency):
                return row
        return None


@dataclass(frozen=True, slots=True)
class Catalog:
    cards: Mapping[str, ModelCard]

    def names(self) -> list[str]:
        return sorted(self.cards)

    def get(self, name: str) -> ModelCard:
        """Return the card of a model by catalog name or hub id."""
        card = self.find(name)
        if card is None:
            raise self.unknown(name)
        return card

    def unknown(self, name: str) -> CatalogError:
        """Return the error for a name that is not in the catalog."""
        return CatalogError(
            f"no model {name!r} in the catalog",
            hint=f"{did_you_mean(name, self.cards)} (a local folder or a hub id ORG/NAME also works)",
        )

    def find(self, name: str) -> ModelCard | None:
        by_id = {card.source.id.lower(): card for card in self.cards.values()}
        return self.cards.get(name) or by_id.get(name.lower())

    def __iter__(self) -> Iterator[ModelCard]:
        return (self.cards[name] for name in self.names())


def load_catalog() -> Catalog:
    folders = (Path(__file__).parent / "models", peagle_home() / "models")
    cards = [load_card(path) for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return Catalog({card.name: card for card in cards})


def load_card(path: Path) -> ModelCard:
    """Load a card, whose name must be the file's name without `.yaml`."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CatalogError(f"{path}: cannot be read as YAML: {error}") from error
    try:
        card = ModelCard.model_validate(values)
    except ValidationError as error:
        errors = error.errors()
        first = errors[0]
        key = ".".join(map(str, first["loc"])) or "the whole file"
        reason = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        unknown = next((fault["loc"] for fault in errors if fault["type"] == "extra_forbidden"), None)
        hint = did_you_mean(str(unknown[-1]), _valid_keys(unknown[:-1])) if unknown else ""
        raise CatalogError(f"{path}: {key}: {reason}{more}", hint=hint) from error
    if card.name != path.stem:
        raise CatalogError(
            f"{path}: the file name differs from the card's name, {card.name}",
            hint=f"rename the file to {card.name}.yaml",
        )
    return card


def _valid_keys(parents: Iterable[Any]) -> list[str]:
    """Return the valid keys of the part of a card that `parents` (keys and list indices) lead to."""
    kind: Any = ModelCard
    for parent in parents:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(parent)].annotation if parent in kind.model_fields else None
        elif get_origin(kind) in (list, dict):
            kind = get_args(kind)[-1]
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def absolute_model_name(name: str) -> str:
    """Return the absolute path if the name is a folder and not in the catalog; otherwise the unchanged name."""
    folder = user_path(name)
    return str(folder.resolve()) if load_catalog().find(name) is None and folder.exists() else name
