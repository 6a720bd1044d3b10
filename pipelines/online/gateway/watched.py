"""Records of a file that others change while the endpoint runs."""

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
    """The records of a file, read again when it has changed.

    A file that cannot be read, as one that somebody is just editing, changes nothing: the records that were read last
    go on holding until it can. One that is gone holds none.

    Args:
        read: the records; none where there is no file. It raises ConfigError.
    """

    def __init__(self, path: Path, read: Callable[[Path], tuple[T, ...]]) -> None:
        self._path = path
        self._read = read
        self._records: tuple[T, ...] = ()
        self._version: tuple[int, int] | None = None
        self._refused: tuple[int, int] | None = None
        self._next_look = 0.0

    def now(self) -> tuple[T, ...]:
        """The records of this moment, or of a second ago.

        Raises:
            ConfigError: the file cannot be read, and never could be.
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
            if version != self._refused:  # it is tried again with each look, and told once
                self._refused = version
                _log.error("%s; the records that were read before it changed go on holding", error.message)


def _version(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        return -1, error.errno or 0
    return status.st_mtime_ns, status.st_ino
