"""Files that are either whole or not there, also after a power cut.

When a function here returns, what it did is on the disk: the bytes (`fsync` of the file) and the name (`fsync` of its
folder).

An answer that gets lost on NFS makes the client send its request again, and the second one finds the first one done: a
`link` says that the name is taken, a `rename` that there is no such file. So after an error the target is compared with
the file that was to get its name.

A disk takes milliseconds for an `fdatasync`, so requests that end at the same time share one. `GroupSync` runs in a
thread of its own, and whoever waits for it is told by a future: an event loop is never held.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

from peagle.errors import CapacityError, ConfigError
from peagle.plain_json import to_json

TEMPORARY_SUFFIX = ".tmp"
_ATTEMPTS = 5
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_LINKS = "name a folder on a local disk, on NFS version 4 or newer (EFS), on Lustre, or in S3"


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` with `data`; a reader sees old bytes or new ones, never both.

    Args:
        mode: permissions from the first byte on; the umask takes some away.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    _put(path, data, _rename, mode)


def write_once(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Create `path` with `data` unless it exists; the first writer wins.

    A hard link is the one local operation that both creates a name and fails when it is taken, so of two writers
    exactly one gets True, whatever is killed in between.

    Args:
        mode: as `write_atomic`.

    Raises:
        OSError: the disk is full, the folder cannot be written, or its file system has no hard links. The file may be
            there all the same.
    """
    return _put(path, data, _link, mode)


def append_line(path: Path, line: bytes) -> None:
    """Add a line, or nothing.

    A disk that is nearly full takes a part and says so by its length only; the next line would then be joined to that
    part, and both lost.

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
    """A file to write that replaces `path` when it is whole.

    For data too big for `write_atomic`.

    Raises:
        FileNotFoundError: somebody has swept the unfinished file away meanwhile.
        OSError: the disk is full, or the folder cannot be written.
    """
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            _flush(file)
            _rename(file, temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, unless it is there."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def remove(path: Path) -> None:
    """Delete a file, if it is there; it does not come back after a power cut."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # nor is there such a folder
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk: creations, renames and deletions.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such call for folders
            raise
    finally:
        os.close(descriptor)


def require_links(folder: Path) -> None:
    """Require a file system that keeps the first-writer-wins rule.

    It is tried: a hard link, a refused second one, and a rename.

    The trial's file is named like lease 0, so that the next driver clears it should it be left.

    Raises:
        ConfigError: the file system cannot do one of them.
        OSError: the folder cannot be written.
    """
    try:
        # Another driver may clear a trial's file under way, and the second link then finds its name free.
        held = any(_is_held(folder / f"0.{uuid.uuid4().hex}.json") for _ in range(_ATTEMPTS))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise ConfigError(f"{folder}: {error.strerror}", hint=_LINKS) from error
    if not held:
        raise ConfigError(f"{folder}: its file system lets two writers create the same name", hint=_LINKS)


def _is_held(trial: Path) -> bool:
    try:
        is_held = write_once(trial, b"1") and not write_once(trial, b"2")
        write_atomic(trial, b"3")
        return is_held
    finally:
        trial.unlink(missing_ok=True)


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep everybody else out of `changing` the same file, by a lock on its folder.

    Raises:
        OSError: there is no such folder, or it cannot be locked.
    """
    folder = os.open(path.parent, os.O_RDONLY)  # not the file, which is replaced
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as indented JSON."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A value as an indented JSON file has it."""
    return (to_json(value, indent=2) + "\n").encode(errors="backslashreplace")


def remove_temporaries(folder: Path, *, older_than_s: float = 0.0) -> int:
    """Delete the files that killed writers left in `folder`; return their number.

    Args:
        older_than_s: where others may be writing to the folder: nobody writes to what has not changed for so long.
    """
    leftovers = [path for path in folder.glob(f".*{TEMPORARY_SUFFIX}") if _age_s(path) >= older_than_s]
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return len(leftovers)


def _age_s(path: Path) -> float:
    """Seconds since a file was changed; none where it is gone."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_Publish = Callable[[BinaryIO, Path, Path], bool]


def _put(path: Path, data: bytes, publish: _Publish, mode: int) -> bool:
    """Write a temporary file, and have `publish` give it its name; whether it got it."""
    for attempt in range(1, _ATTEMPTS + 1):
        temporary = _temporary_name(path)
        try:
            with open(temporary, "xb", opener=functools.partial(os.open, mode=mode)) as file:
                file.write(data)
                _flush(file)  # else a power cut may keep the name and lose the bytes
                published = publish(file, temporary, path)
            break
        except (FileNotFoundError, FileExistsError):
            # Somebody swept the temporary file away as a killed writer's, or the answer to its creation was lost.
            if attempt == _ATTEMPTS or not path.parent.is_dir():
                raise
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)  # also where another was first: what builds on that name may not outlive it
    return published


def _link(file: BinaryIO, temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except OSError as error:
        if _has_name(file, path):
            return True
        if error.errno in _NO_LINKS:
            raise OSError(error.errno, f"its file system has no hard links ({error.strerror})", str(path)) from error
        if not isinstance(error, FileExistsError):
            raise
        return False
    return True


def _rename(file: BinaryIO, temporary: Path, path: Path) -> bool:
    try:
        temporary.replace(path)
    except OSError:
        if not _has_name(file, path):
            raise
    return True


def _has_name(file: BinaryIO, path: Path) -> bool:
    """Whether an open file has got that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


class GroupSync:
    """Puts one file on the disk, again and again, for many who append to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[Future[None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_named = False

    def sync(self) -> "Future[None]":
        """Return when all that was written before outlasts a power cut.

        The future has an OSError where the disk failed: then nobody knows what of the file is on it.
        """
        done: Future[None] = Future()
        with self._changed:
            self._waiting.append(done)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                # Whoever stopped waiting has cancelled its future; from here on none can.
                group = [done for done in self._waiting if done.set_running_or_notify_cancel()]
                self._waiting = []
            try:
                self._sync()
            except OSError as error:
                for done in group:
                    done.set_exception(error)
            else:
                for done in group:
                    done.set_result(None)

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not self._is_named:  # a new file: its name has to last as well
            sync_folder(self._path.parent)
            self._is_named = True
