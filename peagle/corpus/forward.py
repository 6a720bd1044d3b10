"""Readers that only go forward, kept between units.

A compressed file, or a Parquet row group, cannot be entered in the middle. A process that prepares units gets those of
one file in rising order, so it keeps the reader it has and skips ahead: each process passes over a file once, not once
a unit. A unit that lies behind starts again at the beginning, which is slow and right.
"""

import atexit
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

_KEPT = 4  # files that one process reads at the same time


class _Reader(Protocol):
    position: int

    def close(self) -> None:
        """Let the file go."""


Reader = TypeVar("Reader", bound=_Reader)


class ForwardReaders(Generic[Reader]):
    """Readers by path. One that is taken is nobody else's, and one that failed is not put back."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Reader] = OrderedDict()
        atexit.register(self.close)  # the interpreter would name each file that is still open

    def take(self, path: str, position: int) -> Reader | None:
        """A reader of `path` that is not yet past `position`, if there is one."""
        reader = self._kept.pop(path, None)
        if reader is not None and reader.position > position:
            reader.close()
            return None
        return reader

    def put_back(self, path: str, reader: Reader) -> None:
        """Keep a reader for the next unit of its file."""
        if (other := self._kept.pop(path, None)) is not None:
            other.close()
        self._kept[path] = reader
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)[1].close()

    def close(self) -> None:
        """Let all files go."""
        while self._kept:
            self._kept.popitem()[1].close()
