"""Whether ids are unique, without keeping them: what is kept is on disk, and memory does not grow with the rows.

An id becomes 16 bytes of a hash, which also choose one of 256 files. Each of these is small enough to sort.
"""

import hashlib
import struct
import tempfile
from types import TracebackType
from typing import Self

_BUCKETS = 256
_IN_MEMORY_BYTES = 1 << 16  # a bucket; 16 MiB of all
_ENTRY = struct.Struct("<16sQQ")
_Places = tuple[tuple[int, int], tuple[int, int]]


class UniqueIds:
    """Ids with the file and the line that they are on."""

    def __init__(self) -> None:
        # A bucket is closed with all others in __exit__.
        self._buckets = [tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) for _ in range(_BUCKETS)]  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for bucket in self._buckets:
            bucket.close()

    def add(self, value: str, file: int, line: int) -> None:
        """Note an id."""
        digest = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=16).digest()
        self._buckets[digest[0]].write(_ENTRY.pack(digest, file, line))

    def first_repeated(self) -> _Places | None:
        """File and line of an id's first two places, for the id that is repeated first; None if none is."""
        found = [pair for bucket in self._buckets if (pair := self._repeated_in(bucket))]
        return min(found, key=lambda pair: pair[1]) if found else None

    @staticmethod
    def _repeated_in(bucket: "tempfile.SpooledTemporaryFile[bytes]") -> _Places | None:
        import numpy as np

        bucket.seek(0)
        entries = np.frombuffer(bucket.read(), dtype=[(name, "<u8") for name in ("high", "low", "file", "line")])
        order = np.lexsort((entries["line"], entries["file"], entries["low"], entries["high"]))
        a, b = entries[order[:-1]], entries[order[1:]]
        same = (a["high"] == b["high"]) & (a["low"] == b["low"])
        pairs = zip(a[same][["file", "line"]].tolist(), b[same][["file", "line"]].tolist(), strict=True)
        return min(pairs, key=lambda pair: pair[1], default=None)
