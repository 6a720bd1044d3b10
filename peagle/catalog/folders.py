"""A model folder's `config.json` and fingerprint, and the user's own home.

Weights are never loaded.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError
from peagle.private import user_path

_SAMPLE_BYTES = 64 * 1024


def read_config(folder: Path, error_type: type[ConfigError], name: str = "config.json") -> dict[str, Any]:
    """Read `config.json`, or another file like it; faults raise `error_type`."""
    path = folder / name
    try:
        return dict(json.loads(path.read_text()))
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror}", hint="give the folder that holds it") from error
    except ValueError as error:
        raise error_type(f"{path} is not valid JSON: {error}") from error


def folder_fingerprint(folder: Path) -> str:
    """A short hash of a model folder.

    It covers every file's name and size, small files whole, large ones by both ends.

    Copying a folder keeps it; retraining or editing changes it. Hidden files do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def peagle_home() -> Path:
    """`$PEAGLE_HOME`, `~/.peagle` by default. It need not exist yet.

    Raises:
        ConfigError: this user has no home folder, and no variable names another one.
    """
    return user_path(os.environ.get("PEAGLE_HOME") or "~/.peagle")
