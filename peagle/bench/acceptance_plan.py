"""The plan of an evaluation: target, heads, K, engine. Starts nothing.

Everything that can be refused is refused here or in `peagle.bench.prompts`, before an engine starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.bench.acceptance_cells import Cell
from peagle.bench.acceptance_config import EvaluateConfig
from peagle.bench.prompts import Dataset
from peagle.bench.target import target_fingerprint, target_spec
from peagle.catalog.drafters import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import ResolvedModel
from peagle.engine.memory import check_capacity
from peagle.engine.precision import Precision, resolve_precision
from peagle.engine.spec import EngineSpec
from peagle.errors import ConfigError, DrafterError
from peagle.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cells to measure and the engine that they share.

    Attributes:
        spec: the engine without a drafter; each cell adds its own.
        cells: drafter by drafter, K ascending.
        notes: what the user should know of the drafters chosen.
    """

    config: EvaluateConfig
    hardware: Hardware
    model: ResolvedModel
    spec: EngineSpec
    precision: Precision
    cells: list[Cell]
    notes: list[str]

    def engine_spec(self, cell: Cell) -> EngineSpec:
        """The engine of one cell."""
        return replace(self.spec, drafter=cell.spec)

    def fingerprint(self, dataset: Dataset) -> dict[str, Any]:
        """The settings that all cells of one folder share; JSON-ready."""
        shared = target_fingerprint(self.config, self.model, self.spec, self.precision, self.hardware, dataset)
        shared["dataset"]["category_column"] = self.config.category_column
        return shared | {"concurrency": self.config.concurrency}


def make_plan(config: EvaluateConfig, hardware: Hardware, model: ResolvedModel) -> Plan:
    """Decide everything but the prompts.

    Raises:
        ConfigError: of the kind that fits (drafter, precision, context).
        CapacityError: the hardware cannot hold the engine.
    """
    drafters = [_drafter(name, config, hardware, model) for name in config.drafter]
    labelled = zip(_labels(drafters), drafters, strict=True)
    cells = [cell for label, drafter in labelled for cell in _cells(label, drafter, config)]
    spec = target_spec(config, model, max_num_seqs=config.concurrency)
    plan = Plan(
        config=config,
        hardware=hardware,
        model=model,
        spec=spec,
        precision=resolve_precision(spec.precision, hardware, native_quantization=spec.native_quantization),
        cells=cells,
        notes=[f"{drafter.name}: {drafter.note}" for drafter in drafters],
    )
    for cell in cells:
        check_capacity(plan.engine_spec(cell), hardware)
    return plan


def _drafter(name: str, config: EvaluateConfig, hardware: Hardware, model: ResolvedModel) -> ResolvedDrafter:
    largest = max(config.num_speculative_tokens) if config.num_speculative_tokens else None
    drafter = resolve_drafter(
        name, model, config.concurrency, num_speculative_tokens=largest, platform=hardware.platform
    )
    if drafter.spec is None:
        raise DrafterError(
            f"drafter {name} is none here, and without drafts nothing can be accepted: {drafter.note}",
            hint="name one: peagle, eagle3, a folder or a hub id",
        )
    return drafter


def _cells(label: str, drafter: ResolvedDrafter, config: EvaluateConfig) -> list[Cell]:
    assert drafter.spec is not None, "_drafter() refuses none"
    assert drafter.fingerprint is not None, "a head has one"
    return [
        Cell(label=label, fingerprint=drafter.fingerprint, spec=replace(drafter.spec, num_speculative_tokens=k))
        for k in config.num_speculative_tokens or [drafter.spec.num_speculative_tokens]
    ]


def _labels(drafters: Sequence[ResolvedDrafter]) -> list[str]:
    """The drafters' names.

    Equal names (`a/head`, `b/head`) get as much of their paths as tells them apart.

    Raises:
        ConfigError: two of them are the same head.
    """
    fingerprints = [drafter.fingerprint for drafter in drafters]
    paths = [Path(drafter.spec.model).parts for drafter in drafters if drafter.spec]
    for i, drafter in enumerate(drafters):
        if drafter.fingerprint in fingerprints[:i]:
            raise ConfigError(
                f"drafter {drafter.name} is given twice, perhaps under two names", hint="give each head once"
            )
    names = [drafter.name or "" for drafter in drafters]
    depth = 1
    while len(set(names)) < len(names) and depth < max(map(len, paths)):
        depth += 1
        own = [drafter.name for drafter in drafters]
        names = ["/".join(p[-depth:]) if own.count(n) > 1 else str(n) for p, n in zip(paths, own, strict=True)]
    return names
