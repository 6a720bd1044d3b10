"""The files of a ledger.

    session-ID.parquet     the latest heartbeat of an engine process; each heartbeat replaces it
    beats-ID.jsonl         endpoints only: one heartbeat per minute, for costs per hour
    requests-ID.jsonl      endpoints only: one line per request of the process; a batch has a file with one line

A bulk run has its ledger in the run directory, an endpoint in a separate folder. `peagle ledger compact`
(`compaction.py`) merges the lines of processes that have ended:

    requests-merged-HASH.jsonl           segments: the lines of many processes, one after the other
    requests-merged-HASH.jsonl.index     the names and lengths of the segments, in order

The lines of a process are a segment, named after the process's own file. Readers store their offset by that name, so
lines that move to a merged file are neither read twice nor missed. A merged file without an index is ignored.
`beats-*.jsonl` are merged in the same way.
"""

import contextlib
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from peagle.economics.usage import (
    EngineSession,
    RequestUsage,
    interpolate_session,
    session_since,
    sessions_from_table,
    sessions_to_table,
)
from peagle.errors import PeagleError
from peagle.files import append_line, make_folder
from peagle.parquet_table import read_table
from peagle.storage import StoragePath, open_to_read, storage_path, write_atomic, write_once

T = TypeVar("T")
REQUESTS, BEATS = "requests", "beats"  # the values of `kind`
MERGED = "merged-"  # starts the id in names of merged files
INDEX = ".index"  # suffix of the index of a merged file
_MARK_BYTES = 4096  # bytes before an offset that its checksum covers: several lines with unique ids
_MAX_TRIES = 10  # attempts to list or read files that are being compacted


@dataclass(frozen=True, slots=True)
class Segment:
    """The lines of one process: `size` bytes from `begin` in a file.

    `size` is None for the process's own file, which may grow. Methods raise FileNotFoundError if compaction moved the
    file.
    """

    name: str
    path: StoragePath
    begin: int = 0
    size: int | None = None

    def lines(self, position: int) -> Iterator[bytes]:
        """Yield the complete lines after an offset in the segment. An unfinished last line is left out."""
        with open_to_read(self.path) as file:
            file.seek(self.begin + position)
            while self.size is None or position < self.size:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                yield line

    def read(self) -> bytes:
        with open_to_read(self.path) as file:
            file.seek(self.begin)
            return file.read() if self.size is None else file.read(self.size)

    def checksum_to(self, position: int) -> str:
        """Return a checksum of the last `_MARK_BYTES` before an offset, which identifies the offset."""
        with open_to_read(self.path) as file:
            start = max(0, position - _MARK_BYTES)
            file.seek(self.begin + start)
            return hashlib.sha256(file.read(position - start)).hexdigest()

    def current_size(self) -> int:
        return self.path.stat().st_size if self.size is None else self.size


@dataclass(slots=True)
class LedgerFiles:
    """The files of one kind: each process's own, merged ones, and merged ones without an index (orphans)."""

    own: dict[str, StoragePath] = field(default_factory=dict)
    merged: dict[StoragePath, list[Segment]] = field(default_factory=dict)
    orphans: list[StoragePath] = field(default_factory=list)


def segments(folder: StoragePath, kind: str) -> list[Segment]:
    """Return all segments of a ledger, sorted by name. Raises PeagleError if an index is damaged."""
    return retry_if_moved(lambda: list(segments_by_name(ledger_files(folder, kind)).values()))


def retry_if_moved(read: Callable[[], T]) -> T:
    """Call `read`, and retry if compaction deletes a file during the call."""
    for _ in range(_MAX_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def ledger_files(folder: StoragePath, kind: str) -> LedgerFiles:
    """Return the files of a kind, such as `BEATS`. Raises FileNotFoundError if an index was deleted during the call."""
    files = LedgerFiles()
    listing = list_files(folder, kind)
    for name, path in listing.items():
        if not name.endswith(".jsonl"):
            continue
        if not name.startswith(f"{kind}-{MERGED}"):
            files.own[name] = path
        elif name + INDEX in listing:
            index = _read_index(str(listing[name + INDEX]))
            files.merged[path] = [Segment(member, path, begin, size) for member, begin, size in index]
        else:
            files.orphans.append(path)
    return files


def segments_by_name(files: LedgerFiles) -> dict[str, Segment]:
    """Return each segment once, by name.

    After a crash a segment may be in several files; the longest copy counts. If a process continued after its file was
    merged, its new file is a separate segment.
    """
    by_name: dict[str, Segment] = {}
    for members in files.merged.values():
        for segment in members:
            if segment.name not in by_name or by_name[segment.name].current_size() < segment.current_size():
                by_name[segment.name] = segment
    for name, path in files.own.items():
        while name in by_name and not continues_segment(path, by_name[name]):
            name += "+"  # the new file of a process that continued
        by_name[name] = Segment(name, path)
    return dict(sorted(by_name.items()))


def continues_segment(path: StoragePath, merged: Segment) -> bool:
    """Return whether a process's own file starts with the merged segment."""
    size = merged.current_size()
    return path.stat().st_size >= size and Segment(merged.name, path).checksum_to(size) == merged.checksum_to(size)


def find_segment(folder: StoragePath, name: str) -> Segment | None:
    """Return a segment by name, from the process's own file if it exists."""
    path = folder / name
    if path.exists():
        return Segment(name, path)
    return next((segment for segment in segments(folder, name.partition("-")[0]) if segment.name == name), None)


def list_files(folder: StoragePath, kind: str) -> dict[str, StoragePath]:
    """Return a consistent listing of the files of a kind, sorted by name."""
    # A listing during compaction may miss both a new file and the old file that it replaces, so listing is repeated
    # until two consecutive listings are equal.
    previous_names: set[str] | None = None
    for _ in range(_MAX_TRIES):
        listing = {path.name: path for path in folder.glob(f"{kind}-*")}
        if set(listing) == previous_names:
            break
        previous_names = set(listing)
    return dict(sorted(listing.items()))


@lru_cache(maxsize=256)  # an index never changes
def _read_index(index_path: str) -> list[tuple[str, int, int]]:
    members, begin = [], 0
    try:
        for name, size in json.loads(storage_path(index_path).read_bytes())["members"]:
            members.append((str(name), begin, int(size)))
            begin += int(size)
    except (ValueError, TypeError, KeyError) as error:
        raise PeagleError(f"{index_path} is damaged: {error}") from error
    return members


SESSION_FILES, REQUEST_FILES = "session-*.parquet", "requests-*.jsonl"
_TAIL_BYTES = 1024 * 1024  # searched at the end of each file for a recent request of another process
_PIECE_BYTES = 64 * 1024  # read size when reading a file backwards
_CLOCK_SKEW_S = 60.0  # tolerated difference between the clocks of two machines
_log = logging.getLogger(__name__)


def write_session(folder: StoragePath, session: EngineSession) -> None:
    write_atomic(folder / f"session-{session.session_id}.parquet", sessions_to_parquet([session]))


def sessions_to_parquet(sessions: Iterable[EngineSession]) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(sessions_to_table(sessions), sink)
    return sink.getvalue()


def read_sessions(folder: StoragePath) -> list[EngineSession]:
    """Return the latest heartbeat of every engine process."""
    return retry_if_moved(
        lambda: latest_records(session for path in session_files(folder) for session in read_session_file(path))
    )


def session_files(folder: StoragePath) -> list[StoragePath]:
    return [path for name, path in list_files(folder, "session").items() if name.endswith(".parquet")]


def latest_records(sessions: Iterable[EngineSession]) -> list[EngineSession]:
    """Return the latest record of each session; during compaction a session may be in two files."""
    by_id: dict[str, EngineSession] = {}
    for session in sessions:
        other = by_id.get(session.session_id)
        if other is None or other.last_seen_at < session.last_seen_at:
            by_id[session.session_id] = session
    return list(by_id.values())


def read_session_file(path: StoragePath) -> list[EngineSession]:
    import pyarrow as pa

    data = path.read_bytes()
    try:
        return sessions_from_table(read_table(io.BytesIO(data)))
    except (OSError, pa.ArrowException, PeagleError) as error:
        raise PeagleError(f"{path} is damaged: {error}") from error


def append_beat(folder: Path, session: EngineSession) -> None:
    """Append a heartbeat to the history of its engine."""
    append_line(folder / f"beats-{session.session_id}.jsonl", json.dumps(asdict(session)).encode())


class SessionReader:
    """Reads the sessions of a ledger; unchanged files are read only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache: dict[Path, tuple[tuple[int, int], list[EngineSession]]] = {}

    def all(self) -> list[EngineSession]:
        return retry_if_moved(self._read_changed)

    def _read_changed(self) -> list[EngineSession]:
        sessions_by_path = {}
        for path in cast(list[Path], session_files(self._folder)):
            status = path.stat()
            version = (status.st_ino, status.st_mtime_ns)  # each heartbeat creates a new file
            cached = self._cache.get(path)
            sessions_by_path[path] = cached if cached and cached[0] == version else (version, read_session_file(path))
        self._cache = sessions_by_path
        return latest_records(session for _, sessions in sessions_by_path.values() for session in sessions)

    def session_at(self, session: EngineSession, moment: float) -> EngineSession:
        return read_session_at(self._folder, session, moment)

    def since(self, moment: float) -> list[EngineSession]:
        """Return the usage of each session since a Unix time, without sessions that ended earlier."""
        return [
            session if session.started_at >= moment else session_since(session, self.session_at(session, moment))
            for session in self.all()
            if session.last_seen_at > moment
        ]


def read_session_at(folder: StoragePath, session: EngineSession, moment: float) -> EngineSession:
    """Return a session as it was at a Unix time, interpolated between its heartbeats."""
    beats = find_segment(folder, f"{BEATS}-{session.session_id}.jsonl")
    earlier, later = _beats_around(beats, moment) if beats else (None, None)
    later_beats = [beat for beat in (later, session) if beat is not None and beat.last_seen_at > moment]
    next_beat = min(later_beats, key=lambda beat: beat.last_seen_at, default=session)
    return next_beat if next_beat.last_seen_at <= moment else interpolate_session(moment, earlier, next_beat)


def _beats_around(beats: Segment, moment: float) -> tuple[EngineSession | None, EngineSession | None]:
    """Return the last heartbeat at or before a Unix time and the first one after it, by bisection."""
    earlier = later = None
    with open_to_read(beats.path) as file:
        # Heartbeats of lines before `low` are at or before `moment`, those of lines from `high` on are later.
        low, high = beats.begin, beats.begin + beats.current_size()
        while low < high:
            middle = (low + high) // 2
            start, end, beat = _beat_from(beats.path, file, middle)
            if beat is None or start >= high:
                high = middle
            elif beat.last_seen_at <= moment:
                low, earlier = end, beat
            else:
                high, later = middle, beat
    return earlier, later


def _beat_from(path: StoragePath, file: BinaryIO, position: int) -> tuple[int, int, EngineSession | None]:
    """Return the start offset, end offset and content of the first valid heartbeat at or after a byte offset."""
    file.seek(max(0, position - 1))
    if position:
        file.readline()
    while True:
        start, line = file.tell(), file.readline()
        if not line.endswith(b"\n"):  # the end, or an unfinished line
            return start, start, None
        for beat in valid_records(path, [line], lambda line: EngineSession(**json.loads(line))):
            return start, start + len(line), beat


def _lines_backwards(segment: Segment, end: int) -> Iterator[bytes]:
    """Yield the lines of a segment that end at or before a byte offset, from last to first."""
    with open_to_read(segment.path) as file:
        start, partial_line = segment.begin + end - 1, b""  # without the line end
        while start > segment.begin:
            size = min(start - segment.begin, _PIECE_BYTES)
            start -= size
            file.seek(start)
            partial_line, *lines = (file.read(size) + partial_line).split(b"\n")
            yield from reversed(lines)
        if end:
            yield partial_line


def requests_file(folder: Path, session_id: str) -> Path:
    return folder / f"requests-{session_id}.jsonl"


def append_request(folder: Path, request: RequestUsage) -> None:
    """Append a request to the file of its process, in one write.

    A crash leaves at most a torn last line. A power failure may lose lines that are not synced yet (`GroupSync`).
    """
    append_line(requests_file(folder, request.usage.session_id), request.to_json())


def is_billed(folder: Path, request_id: str, *, since: float, session_id: str) -> bool:
    """Return whether another process has billed this request. Only the end of each file is read.

    Skips the file of `session_id`, and files that have not changed since the Unix time `since`.
    """
    own_file = requests_file(folder, session_id)
    return any(
        record.usd > 0
        for path in folder.glob(REQUEST_FILES)
        if path != own_file and path.stat().st_mtime >= since - _CLOCK_SKEW_S
        for record in valid_records(path, _last_lines_with(path, request_id.encode()), RequestUsage.from_json)
        if record.request_id == request_id
    )


def _last_lines_with(path: Path, request_id: bytes) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
        return [line for line in file.read().split(b"\n")[:-1] if request_id in line]


def valid_records(path: StoragePath, lines: Iterable[bytes], parse: Callable[[bytes], T]) -> Iterator[T]:
    """Yield the valid records of these lines; log and skip invalid ones."""
    for line in lines:
        try:
            yield parse(line)
        except (PeagleError, ValueError, TypeError) as error:
            _log.error("%s: skipped an invalid line: %s", path, error)


def write_batch(folder: Path, batch: RequestUsage) -> None:
    """Write the usage of a batch as the only request of a session, unless it is already written."""
    make_folder(folder)
    write_once(requests_file(folder, batch.usage.session_id), batch.to_json() + b"\n")


class RequestReader:
    """Reads each request of a ledger once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}  # by segment

    def new(self) -> list[RequestUsage]:
        """Return the requests since the last call. After an OSError, the next call returns the same requests again."""
        old_offsets = dict(self._offsets)
        try:
            return list(self.iter_new())
        except OSError:
            self._offsets = old_offsets
            raise

    def iter_new(self) -> Iterator[RequestUsage]:
        """Yield each request since the last call once. An unfinished last line is left for the next call."""
        is_complete = False
        while not is_complete:
            is_complete = True
            for segment in segments(self._folder, REQUESTS):
                position = self._offsets.get(segment.name, 0)
                try:
                    for line in segment.lines(position):
                        position += len(line)
                        self._offsets[segment.name] = position
                        yield from valid_records(segment.path, [line], RequestUsage.from_json)
                except FileNotFoundError:  # compaction moved the segment
                    is_complete = False

    def reread_since(self, since: float) -> Iterator[RequestUsage]:
        """Yield again the requests that ended after a Unix time; in each file, the last request comes first."""
        for segment in segments(self._folder, REQUESTS):
            position, path = self._offsets.get(segment.name, 0), cast(Path, segment.path)
            if not position or path.stat().st_mtime < since - _CLOCK_SKEW_S:
                continue
            for request in valid_records(path, _lines_backwards(segment, position), RequestUsage.from_json):
                if request.usage.finished_at < since - _CLOCK_SKEW_S:  # lines are nearly sorted by end time
                    break
                if request.usage.finished_at >= since:
                    yield request

    def marks(self) -> dict[str, tuple[int, str]]:
        """Return the offset read in each segment, with a checksum that identifies the offset."""
        by_name = {segment.name: segment for segment in segments(self._folder, REQUESTS)}
        if missing := self._offsets.keys() - by_name.keys():
            raise FileNotFoundError(f"{self._folder}: {min(missing)} is missing")
        return {name: (position, by_name[name].checksum_to(position)) for name, position in self._offsets.items()}

    def resume(self, marks: Mapping[str, tuple[int, str]]) -> bool:
        """Continue at the offsets of another reader.

        Returns False, and changes nothing, if a segment is missing, or its content before the offset differs.
        """
        try:
            by_name = {segment.name: segment for segment in segments(self._folder, REQUESTS)}
            if any(by_name[name].checksum_to(position) != checksum for name, (position, checksum) in marks.items()):
                return False
        except (OSError, KeyError, PeagleError):
            return False
        self._offsets = {name: position for name, (position, _) in marks.items()}
        return True
