"""Models in an object store, fetched once per node: s3://bucket/models/mine -> $PEAGLE_HOME/fetched/mine-<revision>/.

The revision is a hash of the listing: names, sizes and ETags. A driver does not fetch the weights.
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.catalog.converted import locked, make_folder
from peagle.catalog.folders import end_ranges, fingerprint_of, peagle_home
from peagle.engine.memory import WEIGHT_SUFFIXES
from peagle.errors import CapacityError, CatalogError
from peagle.files import converted_write_errors, write_json
from peagle.storage.s3_path import SCHEME, S3Path

if TYPE_CHECKING:
    from peagle.storage.s3_folder import FolderFile

_LISTING = ".peagle-listing.json"  # names and sizes of all files; hidden to exclude it from fingerprints
_SPACE_HINT = "free some space, or set PEAGLE_HOME to a folder on a larger disk"

_UPLOAD_HINT = "finish the upload, then repeat the command"

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model folder in an object store: its path, and its files."""

    path: S3Path
    files: tuple["FolderFile", ...]

    @property
    def revision(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}:{file.num_bytes}:{file.etag}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def weights_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files if is_weights(file.name))

    def fingerprint(self) -> str:
        """Return the `folder_fingerprint` of a local copy. Reads only both ends of each file, from the store."""
        from peagle.storage.s3_folder import read_ranges

        with ThreadPoolExecutor(16) as pool:
            ends = list(pool.map(lambda file: read_ranges(self.path, file, end_ranges(file.num_bytes)), self.files))
        return fingerprint_of((file.name, file.num_bytes, end) for file, end in zip(self.files, ends, strict=True))


def is_in_object_store(name: str) -> bool:
    """Return whether a model's name is an `s3://` folder."""
    return name.startswith(SCHEME)


def is_weights(name: str) -> bool:
    return Path(name).suffix in WEIGHT_SUFFIXES


def find_stored(url: str) -> StoredModel:
    from peagle.storage.s3_folder import list_files

    at = S3Path.parse(url)
    files, folders = list_files(at)
    _require_complete(at, {file.name for file in files}, folders)
    return StoredModel(path=at, files=tuple(files))


def ensure_fetched(url: str, revision: str | None, *, weights: bool, announce: Announce) -> Path:
    """Fetch a model's missing files, and return the model's folder on this node."""
    if revision is not None:
        folder = _folder(S3Path.parse(url), revision)
        try:
            sizes: dict[str, int] = json.loads((folder / _LISTING).read_text())
            needed = [name for name in sizes if weights or not is_weights(name)]
            if all((folder / name).stat().st_size == sizes[name] for name in needed):
                return folder
        except (OSError, ValueError):
            pass  # something is missing
    model = find_stored(url)
    if revision not in (None, model.revision):
        raise CatalogError(
            f"{url}: the files have been replaced since the command started",
            hint="repeat the command; use a separate folder for each version of a model",
        )
    return fetch(model, weights=weights, announce=announce)


def fetch(model: StoredModel, *, weights: bool = False, announce: Announce = lambda message: None) -> Path:
    """Fetch a listed folder, by default without the weights; return the local folder.

    Safe for concurrent processes on a node: one of them fetches, the others wait.
    """
    folder = _folder(model.path, model.revision)
    make_folder(folder)
    other_files = [file for file in model.files if not is_weights(file.name)]
    # Two locks, so that a process that needs only the tokenizer does not wait for weights.
    with locked(folder.with_name(f".{folder.name}.files.lock")):
        with converted_write_errors(folder, hint=_SPACE_HINT):
            write_json(folder / _LISTING, {file.name: file.num_bytes for file in model.files})
        _fetch(model.path, other_files, folder)
    if not weights:
        return folder
    weight_files = [file for file in model.files if is_weights(file.name)]

    def announce_wait() -> None:
        announce(f"{model.path}: waiting for another process on this node, which is fetching the model")

    with locked(folder.with_name(f".{folder.name}.weights.lock"), on_wait=announce_wait):
        _fetch(model.path, weight_files, folder, announce)
    return folder


def _folder(at: S3Path, revision: str) -> Path:
    return peagle_home() / "fetched" / f"{at.name}-{revision}"


def _require_complete(at: S3Path, names: set[str], folders: list[str]) -> None:
    if not names:
        subfolders = f", only these folders: {', '.join(folders[:3])}" if folders else ""
        raise CatalogError(f"{at}: contains no files{subfolders}", hint="use the folder that contains config.json")
    if "config.json" not in names:
        raise CatalogError(f"{at}: has no config.json", hint="use the folder that contains it")
    if not any(map(is_weights, names)):
        raise CatalogError(f"{at}: has no weights (*{', *'.join(WEIGHT_SUFFIXES)})", hint=_UPLOAD_HINT)
    indices = [name for name in names if name.endswith(".index.json")]
    for index in [name for name in indices if name.endswith(".safetensors.index.json")] or indices:
        try:
            missing = sorted(set(json.loads((at / index).read_bytes())["weight_map"].values()) - names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CatalogError(f"{at / index}: not an index of weights: {error!r}", hint=_UPLOAD_HINT) from error
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CatalogError(f"{at}: {index} lists {len(missing)} missing files: {shown}", hint=_UPLOAD_HINT)


def _fetch(at: S3Path, files: list["FolderFile"], folder: Path, announce: Announce = lambda message: None) -> None:
    """Fetch missing files concurrently. The caller must hold the lock."""
    from peagle.storage.s3_folder import fetch_file, partial_path

    missing = [file for file in files if _size(folder / file.name) != file.num_bytes]
    if not missing:
        return
    total = sum(file.num_bytes for file in missing)
    remaining = total - sum(_size(partial_path(file, folder)) or 0 for file in missing)
    if (free := shutil.disk_usage(folder).free) < remaining:
        raise CapacityError(
            f"{folder}: {at} needs {_gb(remaining)} more, but only {_gb(free)} is free", hint=_SPACE_HINT
        )
    announce(f"fetching {at} into {folder}: {_gb(total)}, of which {_gb(total - remaining)} was already fetched")
    started_at, fetched_bytes, lock = time.monotonic(), 0, threading.Lock()

    def count(num_bytes: int) -> None:
        nonlocal fetched_bytes
        with lock:
            fetched_bytes += num_bytes

    cancelled = threading.Event()
    pool = ThreadPoolExecutor(8)
    try:
        futures = {
            pool.submit(fetch_file, at, file, folder, count=count, is_cancelled=cancelled.is_set)
            for file in sorted(missing, key=lambda file: -file.num_bytes)
        }
        with converted_write_errors(folder, hint=_SPACE_HINT):
            while futures:
                done, futures = wait(futures, timeout=10.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                seconds = time.monotonic() - started_at
                announce(f"fetching {at}: {_gb(fetched_bytes)} of {_gb(total)} after {seconds:.0f} s")
    finally:
        cancelled.set()
        pool.shutdown(cancel_futures=True)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
