"""A folder of measurements, so that the same command does none of them twice.

    NAME.json      what is measured, on what (written once): the fingerprint that every record shares
    cells/*.json   a finished measurement each
    logs/          what the engines print
    ledger/        what the engines cost, for `peagle cost` (`spending.py`)

It knows files and JSON; it knows nothing of what was measured.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from peagle.errors import ConfigError
from peagle.files import json_bytes, make_folder, remove_temporaries, write_json, write_once
from peagle.private import user_path
from peagle.provenance import require_same

SCHEMA = 1
Record = TypeVar("Record")


class MeasurementFolder:
    """The folder of one set of measurements, made or opened.

    Args:
        root: the folder.
        name: of its manifest, without a suffix.
        fingerprint: what every record in it has in common, as JSON-ready data.

    Raises:
        ConfigError: it holds measurements of something else (every difference is named), or cannot be written.
    """

    def __init__(self, root: Path, *, name: str, fingerprint: Mapping[str, Any]) -> None:
        self.root = user_path(root)
        self._logs, self._cells = self.root / "logs", self.root / "cells"
        manifest = self.root / f"{name}.json"
        if manifest.exists():
            require_same(_read(manifest)["fingerprint"], fingerprint, str(root))
        try:
            for folder in (self._logs, self._cells):
                make_folder(folder)
            for folder in (self.root, self._cells):
                remove_temporaries(folder)
            write_once(manifest, json_bytes({"schema": SCHEMA, "fingerprint": dict(fingerprint)}))
        except OSError as error:
            raise ConfigError(f"output {root}: cannot be written: {error}") from error
        require_same(_read(manifest)["fingerprint"], fingerprint, str(root))  # another command may have been the first

    def log(self, name: str) -> Path:
        """Where the engine of a measurement prints to."""
        return self._logs / f"{name}.log"

    def find(self, name: str, from_dict: Callable[[Mapping[str, Any]], Record]) -> Record | None:
        """The result kept under that name; None where there is none.

        Raises:
            ConfigError: the file is damaged.
        """
        path = self._cells / f"{name}.json"
        if not path.exists():
            return None
        try:
            return from_dict(_read(path))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}", hint="delete it: this cell is then done again") from error

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a finished measurement."""
        write_json(self._cells / f"{name}.json", record)


def digest(text: str) -> str:
    """Twelve letters that stand for a text in the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def default_folder(parent: Path, fingerprint: Mapping[str, Any]) -> Path:
    """A folder below `parent` that the same measurements find again, and no others."""
    return parent / digest(json.dumps(fingerprint, sort_keys=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="delete it, or name another --output") from error
    return data
