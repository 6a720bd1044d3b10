"""Converted models under `$PEAGLE_HOME`, created by an atomic rename, with a manifest of checksums to detect damage."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peagle
from peagle.errors import ConfigError, PeagleError
from peagle.files import sha256, write_json

MANIFEST = "peagle-manifest.json"
_VERIFIED = ".verified.json"


def ensure_converted(
    folder: Path, lock_name: str, fill: Callable[[Path], dict[str, Any]], *, before: Callable[[], None]
) -> Path:
    """Return the converted folder; convert it first if it is missing or damaged.

    Safe for concurrent processes: one converts, the others wait.

    Args:
        fill: writes all files into an empty folder; returns a description of their source for the manifest.
        before: called before a conversion starts.
    """
    if is_intact(folder):
        return folder
    make_folder(folder.parent)
    with locked(folder.parent / f".{lock_name}.lock"):
        if not is_intact(folder):
            before()
            _convert(folder, fill)
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether every file exists with its checksum.

    Hashing 269 MB takes 0.6 s, so sizes and modification times of verified files are stored in `.verified.json`.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
        statuses = {name: (folder / name).stat() for name in files}
    except (OSError, ValueError, KeyError):
        return False
    sizes_and_times = {name: [status.st_size, status.st_mtime_ns] for name, status in statuses.items()}
    if any(sizes_and_times[name][0] != entry["size_bytes"] for name, entry in files.items()):
        return False
    with contextlib.suppress(OSError, ValueError):
        if json.loads((folder / _VERIFIED).read_text()) == sizes_and_times:
            return True
    if any(sha256(folder / name) != entry["sha256"] for name, entry in files.items()):
        return False
    with contextlib.suppress(OSError):
        write_json(folder / _VERIFIED, sizes_and_times)
    return True


def run_converter(module: str, arguments: list[str], *, what: str, limit_s: int) -> None:
    """Run `python -m MODULE ARGUMENTS` offline, to keep torch's memory and threads out of this process.

    `what` is the name of the model in error messages.
    """
    package_root = str(Path(peagle.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=limit_s)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeagleError(
            f"converting {what} failed: {reason}", hint=f"for the full output, run {' '.join(command)}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PeagleError(f"converting {what} took longer than {limit_s} s") from error


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "set PEAGLE_HOME to a folder that you can write to"
        raise ConfigError(f"{folder} cannot be created: {error.strerror}", hint=hint) from error


def _convert(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Convert into a temporary folder and rename it. The caller must hold the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)  # left by a conversion that was killed
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        source = fill(staging)
        files = {}
        for path in sorted(staging.iterdir()):
            path.chmod(0o644)
            files[path.name] = {"sha256": sha256(path), "size_bytes": path.stat().st_size}
        (staging / MANIFEST).write_text(json.dumps(source | {"files": files}, indent=2))
        staging.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock among processes; the kernel releases it on exit. `on_wait` is called before waiting."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def log_to_stderr(message: str) -> None:
    """Report a slow operation on standard error, which is the log of an engine."""
    sys.stderr.write(f"peagle: {message}\n")
    sys.stderr.flush()
