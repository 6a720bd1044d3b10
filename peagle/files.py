"""Files that are either whole or not there.

It knows one local file system; it does not know what the bytes mean.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from peagle.errors import CapacityError

TEMPORARY_SUFFIX = ".tmp"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` with `data`; a reader sees the old bytes or the new ones, never a part.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    with _temporary(path, data) as temporary:
        temporary.replace(path)


def write_once(path: Path, data: bytes) -> bool:
    """Create `path` with `data` unless it exists; the first writer wins.

    A hard link is the one local operation that both creates a name and fails when it is taken, so of two writers
    exactly one gets True, whatever is killed in between.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    with _temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


def append_line(path: Path, line: bytes) -> None:
    """Add a line, or nothing. A disk that is nearly full takes a part and says so by its length only; the next line
    would then be joined to that part, and both lost.

    Raises:
        OSError: it could not be written.
    """
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, io.SEEK_END)
        if file.write(line + b"\n") <= len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def writing(path: object, *also: type[Exception], hint: str) -> Iterator[None]:
    """Tell what could not be written, and what to do about it.

    Args:
        path: what is being written, as it is to be named.
        also: errors other than OSError with which a library says that it cannot write.
        hint: what the user can do.

    Raises:
        CapacityError: instead of any of these errors.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        raise CapacityError(f"{path}: cannot be written: {error}", hint=hint) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when it is whole; for what is too big for `write_atomic`.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as indented JSON."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A value as an indented JSON file has it."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def remove_temporaries(folder: Path) -> int:
    """Delete what writers that were killed left in `folder`; the number of files deleted.

    Only for a folder that nobody writes to at this moment.
    """
    leftovers = list(folder.glob(f".*{TEMPORARY_SUFFIX}"))
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return len(leftovers)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may keep the name and lose the bytes
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
