"""A model folder's `config.json` and fingerprint, and `$PEAGLE_HOME`."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError
from peagle.private import user_path

_SAMPLE_BYTES = 64 * 1024


def read_config(folder: Path, error_type: type[ConfigError], name: str = "config.json") -> dict[str, Any]:
    path = folder / name
    try:
        return dict(json.loads(path.read_text()))
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror}", hint="use the folder that contains it") from error
    except ValueError as error:
        raise error_type(f"{path} is not valid JSON: {error}") from error


def folder_fingerprint(folder: Path) -> str:
    """Return a short hash of a model folder: all names and sizes, and both ends of each file's content.

    Copies have the same fingerprint. Hidden files are excluded.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return fingerprint_of((path.name, path.stat().st_size, _both_ends(path)) for path in files)


def fingerprint_of(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Return a folder's fingerprint from (name, size, bytes of `end_ranges`) of its files, sorted by name."""
    digest = hashlib.sha256()
    for name, size, ends in files:
        digest.update(f"{name}:{size}\n".encode())
        digest.update(ends)
    return digest.hexdigest()[:16]


def end_ranges(size: int) -> list[range]:
    """Return the ranges of a file's ends, without overlap; a small file has one.

    >>> end_ranges(0), end_ranges(70_000), end_ranges(200_000)
    ([], [range(0, 65536), range(65536, 70000)], [range(0, 65536), range(134464, 200000)])
    """
    ends = (range(min(size, _SAMPLE_BYTES)), range(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES), size))
    return [end for end in ends if end]


def _both_ends(path: Path) -> bytes:
    content = b""
    with path.open("rb") as file:
        for end in end_ranges(path.stat().st_size):
            file.seek(end.start)
            content += file.read(len(end))
    return content


def peagle_home() -> Path:
    """Return `$PEAGLE_HOME`, by default `~/.peagle`. It might not exist."""
    return user_path(os.environ.get("PEAGLE_HOME") or "~/.peagle")
