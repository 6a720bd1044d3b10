"""Storage of a run directory: a local disk or an object store.

The same few operations work on both.

    write_once     create a name; of several writers the first wins       exclusive link | PUT with If-None-Match: *
    write_atomic   replace a name; a reader sees old bytes or new ones    rename         | PUT
    atomic_file    the same for data larger than memory                   rename         | upload in parts
    make_folder    a folder that outlasts a power cut                     mkdir          | nothing
    remove         a deletion that outlasts a power cut                   unlink         | DELETE

Everything else is as in `pathlib.Path`.
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
    """The part of `os.stat_result` that is used."""

    @property
    def st_size(self) -> int:
        """In bytes."""


class Place(Protocol):
    """A file or folder: a `Path`, or an `S3Path` with the same methods."""

    @property
    def name(self) -> str:
        """The last part."""

    @property
    def stem(self) -> str:
        """The last part without its suffix."""

    def __truediv__(self, name: str, /) -> Self:
        """Return a file or folder in this folder."""

    def exists(self) -> bool:
        """Whether it exists."""

    def is_dir(self) -> bool:
        """Whether it is an existing folder."""

    def stat(self) -> Stat:
        """Return its size."""

    def iterdir(self) -> Iterator[Self]:
        """Iterate over the contents of the folder."""

    def glob(self, pattern: str) -> Iterator[Self]:
        """Iterate over the contents of the folder that match a pattern."""

    def read_bytes(self) -> bytes:
        """Return the content of the file."""

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Create the folder; on S3, do nothing."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""


def place(location: "str | Place") -> Place:
    """Parse a path, or a folder as `s3://bucket/folder`.

    Raises:
        ConfigError: the scheme is not s3, or the bucket or folder is missing.

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
    """Validate, for pydantic, a path that must be local.

    Raises:
        ValueError: it is a URL, which as a path would create a folder of that name.
    """
    if "://" in str(location):
        raise ValueError("has to be a folder on a disk (that every node sees)")
    return location


def require_usable(folder: Place) -> None:
    """Check that an object store supports conditional writes.

    Local folders are checked by `require_links`.

    Raises:
        ConfigError: the store does not support them, refuses access, or does not respond.
    """
    if isinstance(folder, S3Path):
        try:
            folder.require_conditional_writes()
        except StorageError as error:
            raise ConfigError(error.message, hint=error.hint) from error


def require_links(folder: Place) -> None:
    """Check that a file system supports exclusive hard links.

    Object stores are checked by `require_usable`.

    Args:
        folder: must exist.

    Raises:
        ConfigError: the file system has no hard links, or two writers can create the same name.
        OSError: the folder cannot be written.
    """
    if not isinstance(folder, S3Path):
        files.require_links(cast(Path, folder))


def is_remote(path: Place) -> bool:
    """Whether it is in an object store."""
    return isinstance(path, S3Path)


def open_to_read(path: Place) -> BinaryIO:
    """Open a file to read; it is seekable.

    Raises:
        FileNotFoundError: it does not exist.
    """
    return cast(BinaryIO, cast(Path, path).open("rb"))


def presigned_url(path: Place, valid_s: int, disposition: str) -> str | None:
    """Return a URL that gives anyone temporary read access; for a local file, None.

    Args:
        disposition: `Content-Disposition` of the answer.

    Raises:
        StorageError: this process has no credentials.
    """
    return path.presigned_url(valid_s, disposition) if isinstance(path, S3Path) else None


def write_once(path: Place, data: bytes) -> bool:
    """Create `path` with `data` unless it exists.

    Of several writers, only the first gets True.

    Raises:
        OSError, StorageError: it cannot be written. An object store may have stored it nevertheless.
    """
    return path.write_once(data) if isinstance(path, S3Path) else files.write_once(cast(Path, path), data)


def write_atomic(path: Place, data: bytes) -> None:
    """Replace `path` with `data`; a reader sees the old bytes or the new ones.

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
    """Open a file that replaces `path` when the block ends; for data too big for `write_atomic`.

    Raises:
        OSError, StorageError: it cannot be written.
    """
    return path.writer() if isinstance(path, S3Path) else files.atomic_file(cast(Path, path))


def make_folder(folder: Place) -> None:
    """Create a folder and its parents durably; on S3, do nothing.

    Raises:
        OSError: it cannot be created.
    """
    if not isinstance(folder, S3Path):
        files.make_folder(cast(Path, folder))


def remove(path: Place) -> None:
    """Delete a file durably, if it exists.

    Raises:
        OSError, StorageError: it cannot be deleted.
    """
    if isinstance(path, S3Path):
        path.unlink()
    else:
        files.remove(cast(Path, path))


def remove_temporaries(folder: Place, *, older_than_s: float = 0.0) -> int:
    """Delete the temporary files of killed writers in `folder`; return their number.

    Args:
        older_than_s: minimum age, if other processes may be writing: seconds since a file changed, or since an upload
            to a store began.
    """
    if isinstance(folder, S3Path):
        return folder.abort_uploads(older_than_s)
    return files.remove_temporaries(cast(Path, folder), older_than_s=older_than_s)
