"""Storage of a run directory: a local disk or an object store.

The same few operations work on both.

    write_once     create a name; of several writers the first wins       exclusive link | PUT with If-None-Match: *
    write_atomic   replace a name; a reader sees old bytes or new ones    rename         | PUT
    atomic_file    the same for what is too big to be held                rename         | upload in parts
    make_folder    a folder that outlasts a power cut                     mkdir          | nothing
    remove         a deletion that outlasts a power cut                   unlink         | DELETE

The rest is what `pathlib.Path` offers. It knows names and bytes; it does not know what they mean.
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

WRITE_ERRORS = (OSError, StorageError)  # with which a write fails, here or there


class Stat(Protocol):
    """The facts of a file that are asked for."""

    @property
    def st_size(self) -> int:
        """In bytes."""


class Place(Protocol):
    """A file or folder: a `Path`, or an `S3Path`, which has these methods of it."""

    @property
    def name(self) -> str:
        """The last part."""

    @property
    def stem(self) -> str:
        """The last part without its suffix."""

    def __truediv__(self, name: str, /) -> Self:
        """A file or folder in it, by name."""

    def exists(self) -> bool:
        """Whether it is there."""

    def is_dir(self) -> bool:
        """Whether it is a folder that is there."""

    def stat(self) -> Stat:
        """Its size."""

    def iterdir(self) -> Iterator[Self]:
        """The contents of the folder."""

    def glob(self, pattern: str) -> Iterator[Self]:
        """The contents of the folder that match a pattern."""

    def read_bytes(self) -> bytes:
        """All of it."""

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder, where folders are made."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""


def place(location: "str | Place") -> Place:
    """The place of a user's name: a path, or a folder as `s3://bucket/folder`.

    Raises:
        ConfigError: another scheme, or no such name.

    >>> str(place("s3://bucket/runs/first/") / "run.json")
    's3://bucket/runs/first/run.json'
    """
    if isinstance(location, S3Path):
        return location
    if isinstance(location, str) and location.startswith(SCHEME):
        return S3Path.parse(location)
    if isinstance(location, str) and "://" in location:
        raise ConfigError(f"{location!r} is neither local nor in S3", hint=f"write {SCHEME}BUCKET/FOLDER, or a path")
    return user_path(str(location)).absolute()


def on_disk(location: Any) -> Any:
    """Validate, for pydantic, a name that must be on a file system.

    Raises:
        ValueError: a URL; as a path it would be a folder of that name here.
    """
    if "://" in str(location):
        raise ValueError("has to be a folder on a disk (that every node sees)")
    return location


def require_usable(folder: Place) -> None:
    """Require that a store creates a name once only.

    A disk is tried by `require_links`.

    Raises:
        ConfigError: the store cannot do that, refuses, or does not answer.
    """
    if isinstance(folder, S3Path):
        try:
            folder.require_conditional_writes()
        except StorageError as error:
            raise ConfigError(error.message, hint=error.hint) from error


def require_links(folder: Place) -> None:
    """Require that a disk creates a name once only.

    A store is tried by `require_usable`, before it is written.

    Args:
        folder: it is there.

    Raises:
        ConfigError: the file system has no hard links, or two writers can create the same name.
        OSError: the folder cannot be written.
    """
    if not isinstance(folder, S3Path):
        files.require_links(cast(Path, folder))


def is_remote(path: Place) -> bool:
    """Whether it lies in an object store."""
    return isinstance(path, S3Path)


def open_to_read(path: Place) -> BinaryIO:
    """The file to read; it can seek.

    Raises:
        FileNotFoundError: there is none.
    """
    return cast(BinaryIO, cast(Path, path).open("rb"))


def presigned_url(path: Place, valid_s: int, disposition: str) -> str | None:
    """A URL with which anybody can read the file for a while.

    None where no store gives any.

    Args:
        disposition: `Content-Disposition` of the answer.

    Raises:
        StorageError: this process has no credentials.
    """
    return path.presigned_url(valid_s, disposition) if isinstance(path, S3Path) else None


def write_once(path: Place, data: bytes) -> bool:
    """Create `path` with `data` unless it exists.

    The first writer wins, and it alone gets True.

    Raises:
        OSError, StorageError: it cannot be written. In a store it may come to be there all the same.
    """
    return path.write_once(data) if isinstance(path, S3Path) else files.write_once(cast(Path, path), data)


def write_atomic(path: Place, data: bytes) -> None:
    """Replace `path` with `data`; a reader sees old bytes or new ones, never both.

    Raises:
        OSError, StorageError: it cannot be written.
    """
    if isinstance(path, S3Path):
        path.write(data)
    else:
        files.write_atomic(cast(Path, path), data)


def write_json(path: Place, value: Any) -> None:
    """Replace `path` with `value` as indented JSON."""
    write_atomic(path, files.json_bytes(value))


def atomic_file(path: Place) -> contextlib.AbstractContextManager[BinaryIO]:
    """A file to write that replaces `path` when it is whole.

    For data too big for `write_atomic`.

    Raises:
        OSError, StorageError: it cannot be written.
    """
    return path.writer() if isinstance(path, S3Path) else files.atomic_file(cast(Path, path))


def make_folder(folder: Place) -> None:
    """Make a folder and those above it, where folders are made.

    They are there after a power cut.

    Raises:
        OSError: it cannot be made.
    """
    if not isinstance(folder, S3Path):
        files.make_folder(cast(Path, folder))


def remove(path: Place) -> None:
    """Delete a file, if it is there; it does not come back after a power cut.

    Raises:
        OSError, StorageError: it cannot be deleted.
    """
    if isinstance(path, S3Path):
        path.unlink()
    else:
        files.remove(cast(Path, path))


def remove_temporaries(folder: Place, *, older_than_s: float = 0.0) -> int:
    """Delete killed writers' leftovers in `folder`; return their number.

    Args:
        older_than_s: where others may be writing to the folder: nobody writes to what has not changed for so long. In a
            store an upload counts from its beginning.
    """
    if isinstance(folder, S3Path):
        return folder.abort_uploads(older_than_s)
    return files.remove_temporaries(cast(Path, folder), older_than_s=older_than_s)
