"""Atomic, durable files: complete or absent, even after a power failure.

When a function returns, its effect is on the disk: bytes (`fsync` of the file) and names (`fsync` of the folder).

On NFS, a client repeats a request whose response was lost, and the repetition fails although the first request had
succeeded: for `link`, the name already exists; for `rename`, the source is missing. So after an error, the file at
the destination path is compared with the temporary file.
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
_NO_LINK_ERRNOS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_LINKS_HINT = "use a local disk, NFS version 4 or newer (EFS), Lustre, or S3"


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` with `data`. Readers see either the old or the new bytes.

    The file is created with the permissions `mode`, minus the umask.
    """
    _put(path, data, _rename, mode)


def write_once(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Create `path` with `data` unless it exists; return whether this call created it.

    Creating a hard link fails if the name exists, so exactly one of several writers gets True, even if processes are
    killed. After an OSError (disk full, folder not writable, no hard links), the file might exist nevertheless.
    """
    return _put(path, data, _link, mode)


def append_line(path: Path, line: bytes) -> None:
    """Append a line atomically: all of it or none."""
    with path.open("ab", buffering=0) as file:
        original_size = file.seek(0, io.SEEK_END)
        # A nearly full disk may write only a part of the line, and the next line would be joined to that part.
        if file.write(line + b"\n") <= len(line):
            file.truncate(original_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def converted_write_errors(path: object, *other_types: type[Exception], hint: str) -> Iterator[None]:
    """Convert OSError and the other error types to a CapacityError that names `path`."""
    types: tuple[type[Exception], ...] = (OSError, *other_types)
    try:
        yield
    except types as error:
        raise CapacityError(f"{path}: cannot be written: {error}", hint=hint) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends, for data too large to hold in memory.

    Raises FileNotFoundError if another process removed the temporary file.
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
    """Create a folder and its missing parents durably."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a file durably, if it exists."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # the folder does not exist either
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries (creations, renames, deletions) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def require_links(folder: Path) -> None:
    """Try exclusive hard links and renames in a folder; raise ConfigError if its file system does not support them."""
    try:
        # Several attempts, since another driver may remove the trial file, and then the second link succeeds.
        # The file is named like the lease with number 0: if this process is killed, the next driver removes it.
        is_exclusive = any(_creates_exclusively(folder / f"0.{uuid.uuid4().hex}.json") for _ in range(_ATTEMPTS))
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        raise ConfigError(f"{folder}: {error.strerror}", hint=_LINKS_HINT) from error
    if not is_exclusive:
        raise ConfigError(f"{folder}: on this file system two writers can create the same name", hint=_LINKS_HINT)


def _creates_exclusively(trial: Path) -> bool:
    try:
        is_exclusive = write_once(trial, b"1") and not write_once(trial, b"2")
        write_atomic(trial, b"3")
        return is_exclusive
    finally:
        trial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_for_update(path: Path) -> Iterator[None]:
    """Lock a file against changes by other processes that use this function."""
    folder = os.open(path.parent, os.O_RDONLY)  # a lock on the file itself would be lost when it is replaced
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    return (to_json(value, indent=2) + "\n").encode(errors="backslashreplace")


def remove_temporaries(folder: Path, *, older_than_s: float = 0.0) -> int:
    """Delete the temporary files of killed writers; return their number.

    Pass `older_than_s` if other processes may be writing: younger files are kept.
    """
    num_removed = 0
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if max(0.0, time.time() - path.stat().st_mtime) >= older_than_s:
                path.unlink(missing_ok=True)
                num_removed += 1
    return num_removed


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put(path: Path, data: bytes, publish: Callable[[BinaryIO, Path, Path], bool], mode: int) -> bool:
    """Write a temporary file, and return whether `publish` gave it the name `path`."""
    for attempt in range(1, _ATTEMPTS + 1):
        temporary = _temporary_name(path)
        try:
            with open(temporary, "xb", opener=functools.partial(os.open, mode=mode)) as file:
                file.write(data)
                _flush(file)  # before publishing: otherwise a power cut could leave the name without the bytes
                is_published = publish(file, temporary, path)
            break
        except (FileNotFoundError, FileExistsError):
            # Another process removed the temporary file, or the response to its creation was lost (NFS).
            if attempt == _ATTEMPTS or not path.parent.is_dir():
                raise
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)  # also if another writer was first, because the caller relies on that writer's file
    return is_published


def _link(file: BinaryIO, temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except OSError as error:
        if _is_same_file(file, path):
            return True
        if error.errno in _NO_LINK_ERRNOS:
            raise OSError(error.errno, f"the file system has no hard links ({error.strerror})", str(path)) from error
        if not isinstance(error, FileExistsError):
            raise
        return False
    return True


def _rename(file: BinaryIO, temporary: Path, path: Path) -> bool:
    try:
        temporary.replace(path)
    except OSError:
        if not _is_same_file(file, path):
            raise
    return True


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    """Return whether `path` names this open file."""
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
    """Syncs a file that many writers append to. Writers share `fdatasync` calls, which take milliseconds each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[Future[None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_name_durable = False

    def sync(self) -> "Future[None]":
        """Return a future that completes when all previous writes are durable.

        It fails with OSError if the disk failed; then it is unknown which writes are durable.
        """
        future: Future[None] = Future()
        with self._changed:
            self._waiting.append(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                # Skips futures that their waiters have cancelled.
                group = [future for future in self._waiting if future.set_running_or_notify_cancel()]
                self._waiting = []
            try:
                self._sync()
            except OSError as error:
                for future in group:
                    future.set_exception(error)
            else:
                for future in group:
                    future.set_result(None)

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not self._is_name_durable:  # a new file's name must become durable, too
            sync_folder(self._path.parent)
            self._is_name_durable = True
