"""Baselines (step times with and without a drafter) from a profile's cells, a model card's table or a benchmark."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.catalog.cards import StepTable
from peagle.economics.baseline import Baseline, StepTimes, ratio_error
from peagle.economics.usage import EngineSession
from peagle.errors import ConfigError
from peagle.private import user_path
from peagle.profiles.measurements import NONE, Cell, read_cells
from peagle.speculation import break_even_acceptance_length

_HINT = "use the report.json of `peagle bench` with method none and the drafter's method"


def baseline_of_cells(cells: Sequence[Cell], method: str, k: int, source: str) -> Baseline | None:
    """Return the baseline of a method and K at the concurrencies that were also measured without speculation.

    Returns None if there are no such concurrencies, or if the method does not draft in every step.
    """
    plain, drafted = _by_concurrency(cells, NONE, 0), _by_concurrency(cells, method, k)
    steps = tuple(
        StepTimes(
            concurrency=concurrency,
            step_s=drafted_step_s,
            plain_step_s=plain_step_s,
            error=ratio_error([drafted[concurrency].spread, plain[concurrency].spread]),
        )
        for concurrency in sorted(plain.keys() & drafted.keys())
        if (drafted_step_s := drafted[concurrency].step_s) and (plain_step_s := plain[concurrency].step_s)
    )
    return Baseline(source=source, steps=steps) if steps else None


def break_evens(chosen: Cell, cells: Sequence[Cell]) -> dict[int, float]:
    """Return, for each concurrency, the acceptance length below which the plain target is faster than with the drafter.

    Concurrencies without both measurements are left out. Empty if the method does not draft in every step.
    """
    plain = {cell.concurrency: cell.output_tokens_per_s for cell in cells if not cell.has_drafter}
    return {
        cell.concurrency: break_even_acceptance_length(
            cell.acceptance_length / cell.output_tokens_per_s, 1 / plain[cell.concurrency]
        )
        for cell in cells
        if (cell.method, cell.k) == (chosen.method, chosen.k)
        and cell.drafts_each_step
        and cell.acceptance_length is not None
        and cell.concurrency in plain
    }


def _by_concurrency(cells: Sequence[Cell], method: str, k: int) -> dict[int, Cell]:
    """Return the fastest cell of a method and K at each concurrency."""
    matching = [cell for cell in cells if (cell.method, cell.k) == (method, k)]
    comparable = [cell for cell in matching if cell.drafts_each_step or not cell.has_drafter]
    return {cell.concurrency: cell for cell in sorted(comparable, key=lambda cell: cell.output_tokens_per_s)}


def baseline_of_table(table: StepTable, method: str, k: int) -> Baseline | None:
    """Return the baseline of a method and K from the table of a model card, or None."""
    row, plain = table.row(method, k), table.row_without_drafter
    if row is None:
        return None
    unknown: list[float | None] = [None] * len(table.concurrency)
    columns = (table.concurrency, row.step_ms, plain.step_ms, row.spread or unknown, plain.spread or unknown)
    steps = tuple(
        StepTimes(
            concurrency=concurrency, step_s=drafted_ms / 1000, plain_step_s=plain_ms / 1000, error=ratio_error(spreads)
        )
        for concurrency, drafted_ms, plain_ms, *spreads in zip(*columns, strict=True)
    )
    return Baseline(source=table.source, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The report of a benchmark. A setup is a head with its method and K."""

    name: str
    model: str
    hardware: str
    precision: str
    cells: Sequence[Cell]
    setups: Sequence[tuple[str | None, str, int]]

    def baseline(self, session: EngineSession) -> Baseline | None:
        """Return the baseline for an engine with one of the benchmark's heads, or with its model and no head.

        Returns None for other engines, or if the head was measured with several K and the ledger does not contain K.
        """
        k = session.num_speculative_tokens
        matching = [
            (method, setup_k)
            for head, method, setup_k in self.setups
            if head == session.drafter and (session.drafter is not None or self.model == session.model)
            if k in (0, setup_k)  # 0: not recorded
        ]
        source = f"{self.name} ({self.hardware}; {self.precision})"
        return baseline_of_cells(self.cells, *matching[0], source) if len(matching) == 1 else None


def read_benchmark(path: Path) -> Benchmark:
    where = f"baseline {path}"
    try:
        data = json.loads(user_path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}", hint=_HINT) from error
    cells = read_cells(data["cells"], where) if isinstance(data, Mapping) and "cells" in data else []
    if not any(cell.step_s and not cell.has_drafter for cell in cells):
        raise ConfigError(f"{where}: contains no step time without a drafter", hint=_HINT)
    try:
        return Benchmark(
            name=str(path),
            model=str(data["model"]),
            hardware=str(data["hardware"]["description"]),
            precision=str(data["precision"]),
            cells=cells,
            setups=[(setup["head"], str(setup["method"]), int(setup["k"])) for setup in data["setups"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: incomplete benchmark report", hint=_HINT) from error
