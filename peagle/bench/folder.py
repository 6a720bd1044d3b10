"""A folder of finished measurements, which a repeated command does not measure again.

NAME.json      the fingerprint that all records share (written once)
cells/*.json   the finished measurements, one per file
logs/          engine output
ledger/        the cost of the engines, for `peagle cost` (`spending.py`)
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from peagle.errors import ConfigError
from peagle.files import json_bytes, make_folder, remove_temporaries, write_json, write_once
from peagle.private import user_path
from peagle.provenance import require_same_fingerprint

SCHEMA = 1
Record = TypeVar("Record")


class MeasurementFolder:
    """A folder of measurements that share a fingerprint (JSON-ready settings). It is created if it does not exist."""

    def __init__(self, root: Path, *, name: str, fingerprint: Mapping[str, Any]) -> None:
        self.root = user_path(root)
        self._logs, self._cells = self.root / "logs", self.root / "cells"
        manifest = self.root / f"{name}.json"
        if manifest.exists():
            require_same_fingerprint(_read(manifest)["fingerprint"], fingerprint, str(root))
        try:
            for folder in (self._logs, self._cells):
                make_folder(folder)
            for folder in (self.root, self._cells):
                remove_temporaries(folder)
            write_once(manifest, json_bytes({"schema": SCHEMA, "fingerprint": dict(fingerprint)}))
        except OSError as error:
            raise ConfigError(f"output {root}: cannot be written: {error}") from error
        # Another command may have written the file first.
        require_same_fingerprint(_read(manifest)["fingerprint"], fingerprint, str(root))

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def find(self, name: str, from_dict: Callable[[Mapping[str, Any]], Record]) -> Record | None:
        path = self._cells / f"{name}.json"
        if not path.exists():
            return None
        try:
            return from_dict(_read(path))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}", hint="delete it to repeat this pass") from error

    def save(self, name: str, record: Mapping[str, Any]) -> None:
        write_json(self._cells / f"{name}.json", record)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def default_folder(parent: Path, fingerprint: Mapping[str, Any]) -> Path:
    return parent / digest(json.dumps(fingerprint, sort_keys=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="delete it, or use another --output") from error
    return data
