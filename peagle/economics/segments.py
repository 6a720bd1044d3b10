"""Lines of a ledger, wherever `peagle ledger compact` has put them.

    requests-ID.jsonl                    the lines of one process, appended as they come
    requests-merged-HASH.jsonl           the lines of many that have ended, one after the other
    requests-merged-HASH.jsonl.index     which, each with its length and by what its end is known again

A segment is one process's lines, wherever they lie, and its name is that of the process's own file. Readers remember by
it how far they have read, so lines that move are neither read twice nor missed. An index is written before its file and
deleted before it: a merged file without one holds nothing, since all of it is elsewhere. `beats-*.jsonl` likewise.
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
_MARK_BYTES = 4096  # before a place in a file, by which it is known again: some lines, each with an id of its own
_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Segment:
    """One process's lines.

    Attributes:
        path: of the file in which they lie.
        begin: of them in it, in bytes.
        size: None of a process's own file, which may grow.
    """

    name: str
    path: Place
    begin: int = 0
    size: int | None = None

    def lines(self, position: int) -> Iterator[bytes]:
        """The whole lines from a byte of it on; not a last one that is being written.

        Raises:
            FileNotFoundError: it is elsewhere by now.
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
        """All of it.

        Raises:
            FileNotFoundError: it is elsewhere by now.
        """
        with open_to_read(self.path) as file:
            file.seek(self.begin)
            return file.read() if self.size is None else file.read(self.size)

    def mark(self, position: int) -> str:
        """By what the place after so many bytes is known again.

        Raises:
            OSError: it cannot be read.
        """
        with open_to_read(self.path) as file:
            start = max(0, position - _MARK_BYTES)
            file.seek(self.begin + start)
            return hashlib.sha256(file.read(position - start)).hexdigest()

    def size_now(self) -> int:
        """Its bytes."""
        return self.path.stat().st_size if self.size is None else self.size


@dataclass(slots=True)
class Files:
    """The files of one kind, as they lie.

    Attributes:
        own: the processes' own files by name.
        merged: the segments of each merged file that has an index.
        orphans: merged files without one.
    """

    own: dict[str, Place] = field(default_factory=dict)
    merged: dict[Place, list[Segment]] = field(default_factory=dict)
    orphans: list[Place] = field(default_factory=list)


def segments(folder: Place, kind: str) -> list[Segment]:
    """All segments of a ledger, by name.

    Raises:
        OSError: the folder cannot be read.
        PeagleError: an index is damaged.
    """
    return look_again(lambda: list(placed(files_of(folder, kind)).values()))


def look_again(read: Callable[[], T]) -> T:
    """Read files of a ledger; again, where one has gone into another meanwhile."""
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def files_of(folder: Place, kind: str) -> Files:
    """The files of a kind.

    Raises:
        FileNotFoundError: an index was deleted meanwhile.
        PeagleError: one is damaged.
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
    """Each segment once, by name.

    One that is in several files, as after a kill, is where it is longest. A process that went on after its file was
    merged begins a new one: that is a segment of its own.

    Raises:
        FileNotFoundError: a file was deleted meanwhile.
    """
    found: dict[str, Segment] = {}
    for members in files.merged.values():
        for segment in members:
            if segment.name not in found or found[segment.name].size_now() < segment.size_now():
                found[segment.name] = segment
    for name, path in files.own.items():
        while name in found and not goes_on(path, found[name]):
            name += "+"
        found[name] = Segment(name, path)
    return dict(sorted(found.items()))


def goes_on(path: Place, merged: Segment) -> bool:
    """Whether a process's own file begins with what was merged of it."""
    size = merged.size_now()
    return path.stat().st_size >= size and Segment(merged.name, path).mark(size) == merged.mark(size)


def segment_of(folder: Place, name: str) -> Segment | None:
    """One segment by its name: the process's own file, where it has one.

    Raises:
        OSError: the folder cannot be read.
    """
    path = folder / name
    if path.exists():
        return Segment(name, path)
    kind = name.partition("-")[0]
    merged = (one for one in segments(folder, kind) if one.name == name)
    return next(merged, None)


def index_bytes(members: list[tuple[str, int]]) -> bytes:
    """The index of a merged file: names and lengths, in its order."""
    return json.dumps({"version": 1, "members": members}).encode()


def listed(folder: Place, kind: str) -> dict[str, Place]:
    """The files of a kind, of one moment.

    A list may miss a new file and one that was deleted after the new one was there. Of two equal ones none has.
    """
    before: set[str] | None = None
    for _ in range(_LOOKS):
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
