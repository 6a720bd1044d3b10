"""One cell of an evaluation, a drafter at one K: what it is, and what was counted.

Pure arithmetic and data.

It knows nothing of engines, files or how results are shown.

    evaluation.json        what is evaluated, on what (written once), the fingerprint that every cell shares
    cells/*.json           a finished drafter and K each, named by its head's fingerprint
    report.json  report.md  acceptance-length.svg  acceptance-by-position.svg      of the last command
    logs/                  what the engines print
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from peagle.bench.folder import MeasurementFolder, default_folder, digest
from peagle.engine.interface import Generation
from peagle.engine.spec import DrafterSpec
from peagle.errors import EngineError
from peagle.speculation import SpeculationStats

UNCATEGORISED = "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A drafter at one K.

    Attributes:
        label: what people call the drafter, different for each in an evaluation.
        fingerprint: changes when the head does.
        spec: what the engine is given.
    """

    label: str
    fingerprint: str
    spec: DrafterSpec

    @property
    def k(self) -> int:
        """Draft tokens a step."""
        return self.spec.num_speculative_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryResult:
    """The results of the prompts of one category."""

    num_responses: int
    num_output_tokens: int
    speculation: SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The measurements of one cell.

    Attributes:
        k: draft tokens a step.
        start_s: until the engine was up, compiling included.
        wall_s: from the first request to the last response.
        num_refused: requests that the engine did not take.
        speculation: drafts of all responses.
        by_category: empty where the data has no category, or the engine cannot tell requests apart.
        measured_at: UTC, ISO 8601.
        self_check: of the engine, as `SelfCheck.to_dict` has it; None in cells from before there was one.
    """

    drafter: str
    method: str
    fingerprint: str
    k: int
    start_s: float
    wall_s: float
    num_responses: int
    num_refused: int
    num_output_tokens: int
    speculation: SpeculationStats
    by_category: Mapping[str, CategoryResult]
    measured_at: str
    self_check: Mapping[str, Any] | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a verify step yields, its own token included."""
        length = self.speculation.acceptance_length
        assert length is not None, "measure() refuses a cell without drafts"
        return length

    @property
    def output_tokens_per_s(self) -> float:
        """Over the time in which requests ran; the engine's start is not in it."""
        return self.num_output_tokens / self.wall_s

    @property
    def drafted_tokens_per_s(self) -> float:
        """Draft tokens proposed, over the same time."""
        return self.speculation.num_draft_tokens / self.wall_s

    @property
    def accepted_tokens_per_s(self) -> float:
        """Draft tokens that became output, over the same time."""
        return self.speculation.num_accepted_tokens / self.wall_s

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data; the inverse of `from_dict`."""
        return asdict(self) | {
            "speculation": self.speculation.to_dict(),
            "by_category": {
                name: asdict(found) | {"speculation": found.speculation.to_dict()}
                for name, found in self.by_category.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is not what `to_dict` wrote.
        """
        categories = {
            name: CategoryResult(**{**found, "speculation": SpeculationStats.from_dict(found["speculation"])})
            for name, found in data["by_category"].items()
        }
        speculation = SpeculationStats.from_dict(data["speculation"])
        return cls(**{**data, "speculation": speculation, "by_category": categories})


def merged_speculation(generations: Sequence[Generation], totals: SpeculationStats | None) -> SpeculationStats:
    """Drafts of all responses.

    They are counted by response where the engine tells, else by the engine's own counters.

    Raises:
        EngineError: neither is known, or nothing was drafted.
    """
    known = [g.speculation for g in generations if g.speculation is not None]
    merged = sum(known, start=SpeculationStats.empty()) if known else totals
    if merged is None or not merged.num_drafts:
        raise EngineError(
            "the engine drafted nothing, so there is nothing to measure",
            hint="responses of a single token have no draft: raise --max-tokens",
        )
    return merged


def by_category(
    generations: Sequence[Generation | None], categories: Sequence[str | None]
) -> dict[str, CategoryResult]:
    """Responses by category, in alphabetical order.

    Empty where no row names a category, or drafts are not known by response.

    Args:
        generations: by prompt, None where the engine refused it.
        categories: of the same prompts.
    """
    pairs = [(g, c) for g, c in zip(generations, categories, strict=True) if g is not None]
    if all(category is None for _, category in pairs) or all(g.speculation is None for g, _ in pairs):
        return {}
    groups: dict[str, list[Generation]] = {}
    for generation, category in pairs:
        groups.setdefault(UNCATEGORISED if category is None else category, []).append(generation)
    return {name: _category_result(groups[name]) for name in sorted(groups)}


def _category_result(generations: Sequence[Generation]) -> CategoryResult:
    return CategoryResult(
        num_responses=len(generations),
        num_output_tokens=sum(g.num_output_tokens for g in generations),
        speculation=sum((g.speculation for g in generations if g.speculation), start=SpeculationStats.empty()),
    )


SCHEMA = 1
DEFAULT_FOLDER = Path("runs/evaluate")


def default_output(fingerprint: Mapping[str, Any]) -> Path:
    """A folder that the same evaluation finds again, and no other."""
    return default_folder(DEFAULT_FOLDER, fingerprint)


class EvaluationFolder:
    """The folder of one evaluation, made or opened.

    Args:
        root: the folder.
        fingerprint: what every cell in it has in common, as JSON-ready data.

    Raises:
        ConfigError: it holds an evaluation of something else (every difference is named), or cannot be written.
    """

    def __init__(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        self._folder = MeasurementFolder(root, name="evaluation", schema=SCHEMA, fingerprint=fingerprint)
        self.root = self._folder.root

    def log(self, cell: Cell) -> Path:
        """Where the engine of a cell prints to."""
        return self._folder.log(_name(cell))

    def find(self, cell: Cell) -> CellResult | None:
        """An earlier measurement of the cell, under the drafter's present label.

        Raises:
            ConfigError: the file is damaged.
        """
        found = self._folder.find(_name(cell), CellResult.from_dict)
        return replace(found, drafter=cell.label) if found else None

    def keep(self, cell: Cell, result: CellResult) -> None:
        """Keep a finished cell."""
        self._folder.keep(_name(cell), result.to_dict())


def _name(cell: Cell) -> str:
    return f"{cell.spec.method}-{digest(cell.fingerprint)}-k{cell.k}"
