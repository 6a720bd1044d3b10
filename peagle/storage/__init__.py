"""Storage of a run directory: a local disk or an object store.

These operations work on both:

    operation      result                                                 local disk     | object store
    write_once     create a file; only the first of several writers wins  exclusive link | PUT with If-None-Match: *
    write_atomic   replace a file; readers see the old or the new bytes   rename         | PUT
    atomic_file    the same for data larger than memory                   rename         | upload in parts
    make_folder    create a folder that survives a power cut              mkdir          | nothing
    remove         delete a file, even if the power is cut afterwards     unlink         | DELETE

All other operations are methods of `pathlib.Path` that `S3Path` also has.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast

from peagle import files
from peagle.errors import ConfigError, StorageError
from peagle.private import user_path
from peagle.storage.s3_path import READ_AHEAD_BYTES as READ_AHEAD_BYTES
from peagle.storage.s3_path import SCHEME, S3Path

WRITE_ERRORS = (OSError, StorageError)  # raised by a failed write, local or remote


class Stat(Protocol):
    @property
    def st_size(self) -> int: ...


class StoragePath(Protocol):
    """A file or folder: a `Path`, or an `S3Path` with the same methods."""

    @property
    def name(self) -> str: ...

    @property
    def stem(self) -> str: ...

    def __truediv__(self, name: str, /) -> Self: ...

    def exists(self) -> bool: ...

    def is_dir(self) -> bool: ...

    def stat(self) -> Stat: ...

    def iterdir(self) -> Iterator[Self]: ...

    def glob(self, pattern: str) -> Iterator[Self]: ...

    def read_bytes(self) -> bytes: ...

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Create the folder; on S3, do nothing."""

    def unlink(self, missing_ok: bool = False) -> None: ...


def storage_path(location: "str | StoragePath") -> StoragePath:
    """Parse a local path, or an S3 location such as `s3://bucket/folder`; raises ConfigError if it is invalid.

    >>> str(storage_path("s3://bucket/runs/first/") / "run.json")
    's3://bucket/runs/first/run.json'
    """
    if isinstance(location, S3Path):
        return location
    if isinstance(location, str) and location.startswith(SCHEME):
        return S3Path.parse(location)
    if isinstance(location, str) and "://" in location:
        raise ConfigError(f"{location!r} is neither local nor in S3", hint=f"use {SCHEME}BUCKET/FOLDER, or a path")
    return user_path(str(location)).absolute()


def require_local_path(location: Any) -> Any:
    """Refuse URLs. A pydantic validator for local paths."""
    # A URL would otherwise be used as a relative path.
    if "://" in str(location):
        raise ValueError("must be a folder on a disk that every node can access")
    return location


def require_usable(folder: StoragePath) -> None:
    """Raise ConfigError if an object store lacks conditional writes, refuses access or does not respond."""
    if isinstance(folder, S3Path):
        try:
            folder.require_conditional_writes()
        except StorageError as error:
            raise ConfigError(error.message, hint=error.hint) from error


def require_links(folder: StoragePath) -> None:
    """Raise ConfigError if a local folder's file system has no hard links, and OSError if it is not writable."""
    if not isinstance(folder, S3Path):
        files.require_links(cast(Path, folder))


def is_remote(path: StoragePath) -> bool:
    return isinstance(path, S3Path)


def open_to_read(path: StoragePath) -> BinaryIO:
    """Open a seekable file to read."""
    return cast(BinaryIO, cast(Path, path).open("rb"))


def presigned_url(path: StoragePath, valid_s: int, disposition: str) -> str | None:
    """Return a URL with temporary read access and this `Content-Disposition`; None for a local file."""
    return path.presigned_url(valid_s, disposition) if isinstance(path, S3Path) else None


def write_once(path: StoragePath, data: bytes) -> bool:
    """Create `path` with `data` unless it exists. Exactly one of several writers gets True.

    After a StorageError, the object might exist.
    """
    return path.write_once(data) if isinstance(path, S3Path) else files.write_once(cast(Path, path), data)


def write_atomic(path: StoragePath, data: bytes) -> None:
    """Replace `path` with `data`. Readers see either the old or the new bytes."""
    if isinstance(path, S3Path):
        path.write(data)
    else:
        files.write_atomic(cast(Path, path), data)


def write_json(path: StoragePath, value: Any) -> None:
    """Replace `path` with `value` as indented JSON."""
    write_atomic(path, files.json_bytes(value))


def atomic_file(path: StoragePath) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a file that replaces `path` when the block ends; for data too big for `write_atomic`."""
    return path.writer() if isinstance(path, S3Path) else files.atomic_file(cast(Path, path))


def make_folder(folder: StoragePath) -> None:
    """Create a folder and its parents durably; on S3, do nothing."""
    if not isinstance(folder, S3Path):
        files.make_folder(cast(Path, folder))


def remove(path: StoragePath) -> None:
    """Delete a file durably, if it exists."""
    if isinstance(path, S3Path):
        path.unlink()
    else:
        files.remove(cast(Path, path))


def remove_temporaries(folder: StoragePath, *, older_than_s: float = 0.0) -> int:
    """Delete the temporary files of killed writers in `folder`; return their number.

    Pass `older_than_s` if other processes may be writing: files and uploads younger than that are kept.
    """
    if isinstance(folder, S3Path):
        return folder.abort_uploads(older_than_s)
    return files.remove_temporaries(cast(Path, folder), older_than_s=older_than_s)
