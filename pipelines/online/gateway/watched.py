"""A file of records that is reloaded when it changes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from peagle.errors import ConfigError

T = TypeVar("T")
_RELOAD_S = 1.0
_log = logging.getLogger("ray.serve")


class WatchedFile(Generic[T]):
    """The records of a file, reloaded when it changes.

    While the file cannot be read, for example in the middle of an edit, the previous records stay valid. A deleted file
    has no records.

    Args:
        read: reads the records; raises ConfigError if the file is invalid.
    """

    def __init__(self, path: Path, read: Callable[[Path], tuple[T, ...]]) -> None:
        self._path = path
        self._read = read
        self._records: tuple[T, ...] = ()
        self._version: tuple[int, int] | None = None
        self._refused: tuple[int, int] | None = None
        self._next_look = 0.0

    def now(self) -> tuple[T, ...]:
        """Return the records, at most a second old.

        Raises:
            ConfigError: the file could never be read.
        """
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + _RELOAD_S
        return self._records

    def _look(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        try:
            self._records, self._version = self._read(self._path), version
        except ConfigError as error:
            if self._version is None:
                raise
            if version != self._refused:  # retried each time, but logged once
                self._refused = version
                _log.error("%s; the previous records stay valid", error.message)


def _version(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        return -1, error.errno or 0
    return status.st_mtime_ns, status.st_ino
