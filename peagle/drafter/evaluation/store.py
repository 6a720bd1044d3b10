"""The folder of an evaluation: finished cells, so that the same command does none of them twice.

    evaluation.json        what is evaluated, on what (written once), the fingerprint that every cell shares
    cells/*.json           a finished drafter and K each, named by its head's fingerprint
    report.json  report.md  acceptance-length.svg  acceptance-by-position.svg      of the last command
    logs/                  what the engines print

It knows cells and their names; it knows nothing of engines.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.drafter.evaluation.cell import Cell, CellResult
from peagle.measurement.folder import MeasurementFolder, default_folder, digest

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
        """What was measured before, under the label that the drafter has now.

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
