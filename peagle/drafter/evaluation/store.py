"""The folder of an evaluation: finished cells, so that the same command does none of them twice.

    evaluation.json        what is evaluated, on what (written once), the fingerprint that every cell shares
    cells/*.json           a finished drafter and K each, named by its head's fingerprint
    report.json  report.md  acceptance-length.svg  acceptance-by-position.svg      of the last command
    logs/                  what the engines print

It knows files and records; it knows nothing of engines.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.drafter.evaluation.cell import Cell, CellResult
from peagle.errors import ConfigError
from peagle.files import remove_temporaries, write_json
from peagle.manifest import require_same

SCHEMA = 1
DEFAULT_FOLDER = Path("runs/evaluate")


def default_output(fingerprint: Mapping[str, Any]) -> Path:
    """A folder that the same evaluation finds again, and no other."""
    return DEFAULT_FOLDER / _digest(json.dumps(fingerprint, sort_keys=True))


class EvaluationFolder:
    """The folder of one evaluation, made or opened.

    Args:
        root: the folder.
        fingerprint: what every cell in it has in common, as JSON-ready data.

    Raises:
        ConfigError: it holds an evaluation of something else (every difference is named), or cannot be written.
    """

    def __init__(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        self.root = root.expanduser()
        self.logs = self.root / "logs"
        self._cells = self.root / "cells"
        manifest = self.root / "evaluation.json"
        if manifest.exists():
            require_same(self._read(manifest)["fingerprint"], fingerprint, str(root))
        try:
            for folder in (self.logs, self._cells):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.root, self._cells):
                remove_temporaries(folder)
            if not manifest.exists():
                write_json(manifest, {"schema": SCHEMA, "fingerprint": dict(fingerprint)})
        except OSError as error:
            raise ConfigError(f"output {root}: cannot be written: {error}") from error

    def log(self, cell: Cell) -> Path:
        """Where the engine of a cell prints to."""
        return self.logs / f"{self._name(cell)}.log"

    def find(self, cell: Cell) -> CellResult | None:
        """What was measured before, under the label that the drafter has now.

        Raises:
            ConfigError: the file is damaged.
        """
        path = self._cells / f"{self._name(cell)}.json"
        if not path.exists():
            return None
        try:
            return replace(CellResult.from_dict(self._read(path)), drafter=cell.label)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}", hint="delete it: this cell is then done again") from error

    def keep(self, cell: Cell, result: CellResult) -> None:
        """Keep a finished cell."""
        write_json(self._cells / f"{self._name(cell)}.json", result.to_dict())

    def _name(self, cell: Cell) -> str:
        return f"{cell.spec.method}-{_digest(cell.fingerprint)}-k{cell.k}"

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}", hint="delete it, or name another --output") from error
        return data


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
