"""Merge small ledger files while other processes read and write the ledger.

The merged file is written completely before the old files are deleted, so a crash at any point leaves an equivalent
ledger, and the next run finishes the work. Only files of processes that have ended are merged: an hour after the last
record if the process was shut down, else after a day. A file that changes during the merge is kept.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from peagle.economics.ledger import (
    BEATS,
    INDEX,
    MERGED,
    REQUESTS,
    LedgerFiles,
    Segment,
    continues_segment,
    latest_records,
    ledger_files,
    list_files,
    read_session_file,
    read_sessions,
    segments_by_name,
    session_files,
    sessions_to_parquet,
    valid_records,
)
from peagle.economics.usage import EngineSession, RequestUsage
from peagle.storage import StoragePath, remove, write_atomic

_AFTER_SHUTDOWN_S = 3600.0  # since the last record of a process that was shut down
_AFTER_SILENCE_S = 86_400.0  # since the last record of another process
_SMALL_BYTES = 64 * 2**20  # larger files stay as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The number of ledger files before and after a compaction."""

    num_before: int
    num_after: int


def compact(ledger: StoragePath, now: float) -> Compacted:
    """Merge the small files of a ledger.

    Raises FileNotFoundError if another compaction is running, and PeagleError if a file is damaged.
    """
    num_before = _num_files(ledger)
    sessions = {session.session_id: session for session in read_sessions(ledger)}
    for kind in (REQUESTS, BEATS):
        _compact_lines(ledger, kind, sessions, now)
    _compact_sessions(ledger, now)
    return Compacted(num_before=num_before, num_after=_num_files(ledger))


def _num_files(ledger: StoragePath) -> int:
    return sum(len(list_files(ledger, kind)) for kind in (REQUESTS, BEATS, "session"))


# --- files with a line per request or heartbeat


def _compact_lines(ledger: StoragePath, kind: str, sessions: dict[str, EngineSession], now: float) -> None:
    files = ledger_files(ledger, kind)
    _remove_leftovers(ledger, files)
    small = [path for path in files.merged if path.stat().st_size < _SMALL_BYTES]
    chosen = [
        segment
        for segment in segments_by_name(files).values()
        if segment.path in small
        or (segment.size is None and segment.current_size() < _SMALL_BYTES and _has_ended(segment, kind, sessions, now))
    ]
    if len({segment.path.name for segment in chosen}) < 2:
        return
    written, copied = set[str](), list[tuple[Segment, int]]()
    for group in _groups(chosen):
        name, sizes = _write_merged(ledger, kind, group)
        written.add(name)
        copied += zip(group, sizes, strict=True)
    for segment, size in copied:
        if segment.size is None and segment.current_size() == size:
            remove(segment.path)
    for path in small:
        if path.name not in written:
            remove(ledger / (path.name + INDEX))
            remove(path)


def _write_merged(ledger: StoragePath, kind: str, group: list[Segment]) -> tuple[str, list[int]]:
    """Write the merged file; return its name and the size of each segment, including a torn last line."""
    parts = [segment.read() for segment in group]
    complete = [part[: part.rfind(b"\n") + 1] for part in parts]
    members = [(segment.name, len(part)) for segment, part in zip(group, complete, strict=True)]
    index = json.dumps({"version": 1, "members": members}).encode()
    data = b"".join(complete)
    name = f"{kind}-{MERGED}{hashlib.sha256(index + data).hexdigest()[:32]}.jsonl"
    write_atomic(ledger / (name + INDEX), index)
    write_atomic(ledger / name, data)
    return name, [len(part) for part in parts]


def _remove_leftovers(ledger: StoragePath, files: LedgerFiles) -> None:
    """Remove merged files without an index, and processes' own files that were merged completely."""
    for orphan in files.orphans:
        if not (ledger / (orphan.name + INDEX)).exists():  # the listing might have missed the index
            remove(orphan)
    merged = {segment.name: segment for members in files.merged.values() for segment in members}
    for name, path in list(files.own.items()):
        segment = merged.get(name)
        if segment and path.stat().st_size == segment.current_size() and continues_segment(path, segment):
            remove(path)
            del files.own[name]


def _groups(chosen: list[Segment]) -> Iterator[list[Segment]]:
    """Yield groups of segments, each for a merged file of about `_SMALL_BYTES`."""
    group: list[Segment] = []
    num_bytes = 0
    for segment in chosen:
        group.append(segment)
        num_bytes += segment.current_size()
        if num_bytes >= _SMALL_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _has_ended(segment: Segment, kind: str, sessions: Mapping[str, EngineSession], now: float) -> bool:
    """Return whether no process appends to this file any more."""
    # A plus marks the new file of a process that continued.
    session_id = segment.name.removeprefix(f"{kind}-").rstrip("+").removesuffix(".jsonl")
    if session := sessions.get(session_id):
        return _session_has_ended(session, now)
    # Some files have no session, such as the file of a batch. They have ended if their last request is old.
    lines = segment.lines(0) if kind == REQUESTS else iter(())
    requests = valid_records(segment.path, lines, RequestUsage.from_json)
    return max((request.usage.finished_at for request in requests), default=now) < now - _AFTER_SILENCE_S


def _session_has_ended(session: EngineSession, now: float) -> bool:
    return session.last_seen_at < now - (_AFTER_SHUTDOWN_S if session.ended else _AFTER_SILENCE_S)


# --- sessions


def _compact_sessions(ledger: StoragePath, now: float) -> None:
    old_content = {path: path.read_bytes() for path in session_files(ledger)}
    sessions_by_path = {path: read_session_file(path) for path in old_content}
    ended = [
        path
        for path, sessions in sessions_by_path.items()
        if all(_session_has_ended(session, now) for session in sessions)
    ]
    if len(ended) < 2:
        return
    data = sessions_to_parquet(latest_records(session for path in ended for session in sessions_by_path[path]))
    name = f"session-{MERGED}{hashlib.sha256(data).hexdigest()[:32]}.parquet"
    write_atomic(ledger / name, data)
    for path in ended:
        if path.name != name and path.read_bytes() == old_content[path]:
            remove(path)
