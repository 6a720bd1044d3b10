"""An object as a file to read, anywhere in it.

It is fetched in large pieces, because a request costs more time than a megabyte. It knows one object.
"""

import io
from typing import Any, BinaryIO, cast

from peagle.storage.s3_client import Address, ObjectStore

_TAIL_BYTES = 1 << 16  # with a Parquet file's footer in it, and most often all of a unit


def open_to_read(store: ObjectStore, at: Address, read_ahead: int) -> BinaryIO:
    """An object as a file that can seek.

    Args:
        read_ahead: bytes to fetch and hold at least.

    Raises:
        FileNotFoundError: there is none.
    """
    return cast(BinaryIO, io.BufferedReader(_Reader(store, at, read_ahead), _TAIL_BYTES))


class _Reader(io.RawIOBase):
    def __init__(self, store: ObjectStore, at: Address, read_ahead: int) -> None:
        self._store, self._at, self._read_ahead = store, at, read_ahead
        self._tail, self._size, self._etag = store.read_tail(at, _TAIL_BYTES)
        self._tail_at = self._size - len(self._tail)
        self._piece, self._piece_at = b"", 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._some(min(len(buffer), self._size - self._position))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _some(self, num_bytes: int) -> bytes:
        """At least one byte from the position on, and at most so many; none at the end."""
        if num_bytes <= 0:
            return b""
        if (start := self._position - self._tail_at) >= 0:
            return self._tail[start : start + num_bytes]
        start = self._position - self._piece_at
        if not 0 <= start < len(self._piece):
            last = min(self._position + max(num_bytes, self._read_ahead), self._tail_at) - 1
            self._piece = self._store.read_range(self._at, self._position, last, self._etag)
            self._piece_at = self._position
            start = 0
        return self._piece[start : start + num_bytes]
