"""Helpers for test reports: their origin (command, revision, machine), their files, and progress messages."""

import json
import time
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.provenance import git_revision, versions


def origin(command: str) -> dict[str, Any]:
    """Return a report's first entries, which say how it was made."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": hardware.detect().describe(),
        "versions": versions(),
        "git_revision": git_revision(),
    }


def origin_text(data: dict[str, Any]) -> str:
    """Return the entries of `origin` in Markdown."""
    return (
        f"`{data['command']}` at revision {data['git_revision']}.\nMachine: {data['machine']}. Versions: "
        + ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        + "."
    )


def write_report(path: Path, data: dict[str, Any], text: str) -> Path:
    """Write the text as Markdown and the data as JSON. Return the path of the Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n")
    path.write_text(text)
    return path


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201
