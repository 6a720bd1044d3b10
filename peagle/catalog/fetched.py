"""Models in an object store, fetched once a node.

    s3://bucket/models/mine -> $PEAGLE_HOME/fetched/mine-<revision>/    config.json  *.safetensors  tokenizer...

The revision is of the listing: names, sizes and ETags. Replaced files have another one, and a node that has the folder
asks the store nothing. A driver takes all but the weights, which only nodes with engines need.

It knows files; what a configuration means is `targets.py`'s and `drafters.py`'s business.
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
from peagle.files import write_json, writing
from peagle.storage.s3_path import SCHEME, S3Path

if TYPE_CHECKING:
    from peagle.storage.s3_folder import FolderFile

_LISTING = ".peagle-listing.json"  # names and sizes of all files; hidden, so no part of a fingerprint
_LOOKS_AT_ONCE = 16
_FILES_AT_ONCE = 8
_TELL_S = 10.0
_ROOM = "free some space, or set PEAGLE_HOME to a folder on a larger disk"

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model folder in a store, as its listing has it."""

    at: S3Path
    files: tuple["FolderFile", ...]

    @property
    def revision(self) -> str:
        """A short hash of the listing."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}:{file.num_bytes}:{file.etag}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def weights_bytes(self) -> int:
        """The size of its weights."""
        return sum(file.num_bytes for file in self.files if is_weights(file.name))

    def fingerprint(self) -> str:
        """The fingerprint that a copy would have (`folder_fingerprint`).

        Both ends of each file are read in the store.

        Raises:
            StorageError: a file was replaced since it was listed, or the store refuses.
        """
        from peagle.storage.s3_folder import read_ranges

        with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            ends = list(pool.map(lambda file: read_ranges(self.at, file, end_ranges(file.num_bytes)), self.files))
        return fingerprint_of((file.name, file.num_bytes, end) for file, end in zip(self.files, ends, strict=True))


def is_stored(name: str) -> bool:
    """Whether a model's name is a folder in a store."""
    return name.startswith(SCHEME)


def is_weights(name: str) -> bool:
    """Whether a file holds weights, by its name."""
    return Path(name).suffix in WEIGHT_SUFFIXES


def find_stored(url: str) -> StoredModel:
    """Look at the model folder that a URL names; nothing is fetched.

    Raises:
        ConfigError: the URL names no folder.
        CatalogError: the folder has nothing, no `config.json`, no weights, or not all that its index names.
        StorageError: the store refuses, or does not answer.
    """
    from peagle.storage.s3_folder import list_files

    at = S3Path.parse(url)
    files, folders = list_files(at)
    _require_whole(at, {file.name for file in files}, folders)
    return StoredModel(at=at, files=tuple(files))


def ensure_fetched(url: str, revision: str | None, *, weights: bool, announce: Announce) -> Path:
    """This node's folder of a model in a store, fetched now where it is missing.

    Args:
        revision: as its spec pins it; None takes what is there.
        weights: whether they are needed, or only what lies beside them.
        announce: is told, in a sentence, what takes long.

    Raises:
        CatalogError: its files were replaced; or as `find_stored`.
        StorageError, CapacityError, ConfigError: as `fetch`.
    """
    if revision is not None and _is_there(folder := _folder(S3Path.parse(url), revision), weights=weights):
        return folder
    model = find_stored(url)
    if revision not in (None, model.revision):
        raise CatalogError(
            f"{url}: its files were replaced since the command that needs them began",
            hint="repeat the command; keep each version of a model in a folder of its own",
        )
    return fetch(model, weights=weights, announce=announce)


def fetch(model: StoredModel, *, weights: bool = False, announce: Announce = lambda message: None) -> Path:
    """Fetch a folder that was looked at; return where it is now.

    Safe when several processes of a node ask at once: one fetches, the others wait for it.

    Args:
        weights, announce: as in `ensure_fetched`; without weights nothing takes long.

    Raises:
        StorageError: the store refuses or does not answer, or its files were replaced meanwhile.
        CapacityError: the disk is full.
        ConfigError: `$PEAGLE_HOME` cannot be written to.
    """
    folder = _folder(model.at, model.revision)
    make_folder(folder)
    small = [file for file in model.files if not is_weights(file.name)]
    # Two locks: who needs a tokenizer does not wait for weights.
    with locked(folder.with_name(f".{folder.name}.files.lock")):
        with writing(folder, hint=_ROOM):
            write_json(folder / _LISTING, {file.name: file.num_bytes for file in model.files})
        _fetch(model.at, small, folder)
    if not weights:
        return folder
    large = [file for file in model.files if is_weights(file.name)]

    def waiting() -> None:
        announce(f"{model.at}: another process of this node fetches it, and is waited for")

    with locked(folder.with_name(f".{folder.name}.weights.lock"), waiting=waiting):
        _fetch(model.at, large, folder, announce)
    return folder


def _folder(at: S3Path, revision: str) -> Path:
    return peagle_home() / "fetched" / f"{at.name}-{revision}"


def _is_there(folder: Path, *, weights: bool) -> bool:
    """Whether all that is needed of a folder is on this disk."""
    try:
        sizes: dict[str, int] = json.loads((folder / _LISTING).read_text())
        needed = [name for name in sizes if weights or not is_weights(name)]
        return all((folder / name).stat().st_size == sizes[name] for name in needed)
    except (OSError, ValueError):
        return False


def _require_whole(at: S3Path, names: set[str], folders: list[str]) -> None:
    """Refuse what is no model folder, or not all of one.

    Raises:
        CatalogError: it says what is missing.
    """
    if not names:
        inside = f"; it has only the folders {', '.join(folders[:3])}" if folders else ""
        raise CatalogError(f"{at}: there is no file{inside}", hint="name the folder that holds config.json")
    if "config.json" not in names:
        raise CatalogError(f"{at}: there is no config.json in it", hint="name the folder that holds it")
    if not any(map(is_weights, names)):
        raise CatalogError(f"{at}: there are no weights in it (*{', *'.join(WEIGHT_SUFFIXES)})", hint=_UPLOAD)
    indices = [name for name in names if name.endswith(".index.json")]
    for index in [name for name in indices if name.endswith(".safetensors.index.json")] or indices:
        missing = sorted(_indexed(at, index) - names)
        if missing:
            some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CatalogError(f"{at}: {index} names {len(missing)} files that are not there: {some}", hint=_UPLOAD)


_UPLOAD = "finish its upload, then repeat the command"


def _indexed(at: S3Path, index: str) -> set[str]:
    """The weight files that an index names."""
    try:
        return set(json.loads((at / index).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CatalogError(f"{at / index}: it is not an index of weights: {error!r}", hint=_UPLOAD) from error


def _fetch(at: S3Path, files: list["FolderFile"], folder: Path, announce: Announce = lambda message: None) -> None:
    """Fetch those that are missing, several at once; the caller holds the lock."""
    from peagle.storage.s3_folder import copy_path, fetch_file

    missing = [file for file in files if _size(folder / file.name) != file.num_bytes]
    if not missing:
        return
    progress = _Progress(at, sum(file.num_bytes for file in missing))
    left = progress.total - sum(_size(copy_path(file, folder)) or 0 for file in missing)
    if (free := shutil.disk_usage(folder).free) < left:
        raise CapacityError(f"{folder}: {at} needs {_gb(left)} more, and {_gb(free)} are free", hint=_ROOM)
    announce(f"fetching {at} into {folder}: {_gb(progress.total)}, {_gb(progress.total - left)} of it there already")
    given_up = threading.Event()
    pool = ThreadPoolExecutor(_FILES_AT_ONCE)
    try:
        todo = {
            pool.submit(fetch_file, at, file, folder, count=progress.add, is_given_up=given_up.is_set)
            for file in sorted(missing, key=lambda file: -file.num_bytes)
        }
        with writing(folder, hint=_ROOM):
            while todo:
                done, todo = wait(todo, timeout=_TELL_S, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
                announce(progress.line())
    finally:
        given_up.set()
        pool.shutdown(cancel_futures=True)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


class _Progress:
    """Bytes that are there, and how fast they come."""

    def __init__(self, at: S3Path, total: int) -> None:
        self.total = total
        self._at, self._there, self._began_at, self._lock = at, 0, time.monotonic(), threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes; threads call it."""
        with self._lock:
            self._there += num_bytes

    def line(self) -> str:
        """How far it is."""
        seconds = time.monotonic() - self._began_at
        return f"fetching {self._at}: {_gb(self._there)} of {_gb(self.total)} after {seconds:.0f} s"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
