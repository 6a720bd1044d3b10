"""Segments of a ledger: the lines of one process, in its own file or in a merged one.

    requests-ID.jsonl                    the lines of one process
    requests-merged-HASH.jsonl           the lines of many ended processes, one after the other
    requests-merged-HASH.jsonl.index     their names and lengths, in order

A segment is named after the process's own file. Readers keep their offset by that name, so lines that move are neither
read twice nor missed. An index is written before its file and deleted before it, so a merged file without an index is
ignored. `beats-*.jsonl` work in the same way.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from peagle.errors import PeagleError
from peagle.storage import Place, open_to_read, place

T = TypeVar("T")
REQUESTS, BEATS = "requests", "beats"
MERGED = "merged-"
INDEX = ".index"
_MARK_BYTES = 4096  # checked before an offset: several lines with unique ids
_RETRIES = 10


@dataclass(frozen=True, slots=True)
class Segment:
    """The lines of one process.

    Attributes:
        path: the file that contains them.
        begin: their offset in the file.
        size: their bytes; None for the process's own file, which may grow.
    """

    name: str
    path: Place
    begin: int = 0
    size: int | None = None

    def lines(self, position: int) -> Iterator[bytes]:
        """Yield the whole lines from an offset in the segment, without an unfinished last one.

        Raises:
            FileNotFoundError: compaction moved it.
        """
        with open_to_read(self.path) as file:
            file.seek(self.begin + position)
            while self.size is None or position < self.size:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                yield line

    def read(self) -> bytes:
        """Return the content.

        Raises:
            FileNotFoundError: compaction moved it.
        """
        with open_to_read(self.path) as file:
            file.seek(self.begin)
            return file.read() if self.size is None else file.read(self.size)

    def mark(self, position: int) -> str:
        """Return a checksum of the bytes before an offset, which identifies the offset.

        Raises:
            OSError: the file cannot be read.
        """
        with open_to_read(self.path) as file:
            start = max(0, position - _MARK_BYTES)
            file.seek(self.begin + start)
            return hashlib.sha256(file.read(position - start)).hexdigest()

    def size_now(self) -> int:
        return self.path.stat().st_size if self.size is None else self.size


@dataclass(slots=True)
class Files:
    """The files of one kind.

    Attributes:
        own: processes' own files by name.
        merged: segments of each merged file that has an index.
        orphans: merged files without an index.
    """

    own: dict[str, Place] = field(default_factory=dict)
    merged: dict[Place, list[Segment]] = field(default_factory=dict)
    orphans: list[Place] = field(default_factory=list)


def segments(folder: Place, kind: str) -> list[Segment]:
    """Return all segments of a ledger, sorted by name.

    Raises:
        OSError: the folder cannot be read.
        PeagleError: an index is damaged.
    """
    return retry_if_moved(lambda: list(placed(files_of(folder, kind)).values()))


def retry_if_moved(read: Callable[[], T]) -> T:
    """Call `read`, and retry if compaction deletes a file meanwhile."""
    for _ in range(_RETRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def files_of(folder: Place, kind: str) -> Files:
    """Return the files of a kind.

    Raises:
        FileNotFoundError: an index was deleted during the call.
        PeagleError: an index is damaged.
    """
    found = Files()
    there = listed(folder, kind)
    for name, path in there.items():
        if not name.endswith(".jsonl"):
            continue
        if not name.startswith(f"{kind}-{MERGED}"):
            found.own[name] = path
        elif name + INDEX in there:
            found.merged[path] = _members(str(there[name + INDEX]), path)
        else:
            found.orphans.append(path)
    return found


def placed(files: Files) -> dict[str, Segment]:
    """Return each segment once, by name.

    After a crash a segment may be in several files; the longest one counts. If a process continued after its file was
    merged, its new file is another segment.

    Raises:
        FileNotFoundError: a file was deleted during the call.
    """
    found: dict[str, Segment] = {}
    for members in files.merged.values():
        for segment in members:
            if segment.name not in found or found[segment.name].size_now() < segment.size_now():
                found[segment.name] = segment
    for name, path in files.own.items():
        while name in found and not continues_segment(path, found[name]):
            name += "+"
        found[name] = Segment(name, path)
    return dict(sorted(found.items()))


def continues_segment(path: Place, merged: Segment) -> bool:
    """Return whether a process's own file starts with the merged segment."""
    size = merged.size_now()
    return path.stat().st_size >= size and Segment(merged.name, path).mark(size) == merged.mark(size)


def segment_of(folder: Place, name: str) -> Segment | None:
    """Return a segment by name, from the process's own file if it exists.

    Raises:
        OSError: the folder cannot be read.
    """
    path = folder / name
    if path.exists():
        return Segment(name, path)
    kind = name.partition("-")[0]
    merged = (segment for segment in segments(folder, kind) if segment.name == name)
    return next(merged, None)


def index_bytes(members: list[tuple[str, int]]) -> bytes:
    return json.dumps({"version": 1, "members": members}).encode()


def listed(folder: Place, kind: str) -> dict[str, Place]:
    """Return a consistent listing of the files of a kind.

    A listing during compaction may miss both a new file and the old one that it replaces, so it is repeated until two
    are equal.
    """
    before: set[str] | None = None
    for _ in range(_RETRIES):
        there = {path.name: path for path in folder.glob(f"{kind}-*")}
        if set(there) == before:
            break
        before = set(there)
    return dict(sorted(there.items()))


def _members(index: str, path: Place) -> list[Segment]:
    return [Segment(name, path, begin, size) for name, begin, size in _read_index(index)]


@lru_cache(maxsize=256)  # an index never changes
def _read_index(index: str) -> list[tuple[str, int, int]]:
    found, begin = [], 0
    try:
        for name, size in json.loads(place(index).read_bytes())["members"]:
            found.append((str(name), begin, int(size)))
            begin += int(size)
    except (ValueError, TypeError, KeyError) as error:
        raise PeagleError(f"{index} is damaged: {error}") from error
    return found
