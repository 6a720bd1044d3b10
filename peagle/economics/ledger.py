"""The files of a ledger.

    session-ID.parquet     the last heartbeat of an engine process; replaced by the next
    beats-ID.jsonl         the endpoint only: a heartbeat a minute, kept; what an hour cost is read from them
    requests-ID.jsonl      the endpoint only: a line for each request that the process had; appended
                           (of a batch: one line for all of it, written once)

Bulk keeps a ledger in its run directory and the endpoint in a folder of its own. It knows files and records; what they
cost is `cost.py`.
"""

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from peagle.economics.usage import (
    EngineSession,
    RequestUsage,
    session_at,
    session_since,
    sessions_from_table,
    sessions_to_table,
)
from peagle.errors import PeagleError
from peagle.files import append_line
from peagle.storage import Place, write_atomic, write_once

T = TypeVar("T")
_TAIL_BYTES = 1024 * 1024  # of each file, where a request is looked for that another process has just had
_CLOCKS_S = 60.0  # so far apart two machines' clocks may be
_log = logging.getLogger(__name__)


def write_session(folder: Place, session: EngineSession) -> None:
    """Replace the heartbeat of one engine process."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(sessions_to_table([session]), sink)
    write_atomic(folder / f"session-{session.session_id}.parquet", sink.getvalue())


def read_sessions(folder: Place) -> list[EngineSession]:
    """The last heartbeat of every engine process that ever wrote here.

    Raises:
        PeagleError: a file is no such record.
    """
    paths = sorted(folder.glob("session-*.parquet"), key=lambda path: path.name)
    return [session for path in paths for session in _sessions(path)]


def _sessions(path: Place) -> list[EngineSession]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = path.read_bytes()
    try:
        return sessions_from_table(pq.read_table(io.BytesIO(data)))
    except (OSError, pa.ArrowException, PeagleError) as error:
        raise PeagleError(f"{path} is damaged: {error}") from error


def append_beat(folder: Path, session: EngineSession) -> None:
    """Keep a heartbeat beside those before it.

    Raises:
        OSError: it could not be written.
    """
    append_line(folder / f"beats-{session.session_id}.jsonl", json.dumps(asdict(session)).encode())


def read_sessions_since(folder: Path, since: float) -> list[EngineSession]:
    """What every engine process did after a Unix time; those that had ended are left out.

    Raises:
        PeagleError: a file is no such record.
    """
    alive = [session for session in read_sessions(folder) if session.last_seen_at > since]
    return [
        session if session.started_at >= since else session_since(session, _session_then(folder, session, since))
        for session in alive
    ]


def _session_then(folder: Path, session: EngineSession, moment: float) -> EngineSession:
    """A session as it was at a moment of its life: between the kept heartbeats before and after it."""
    beats = [beat for beat in _beats(folder, session) if beat.last_seen_at < session.last_seen_at] + [session]
    earlier = [beat for beat in beats if beat.last_seen_at <= moment]
    return session_at(moment, earlier[-1] if earlier else None, beats[len(earlier)])


def _beats(folder: Path, session: EngineSession) -> list[EngineSession]:
    path = folder / f"beats-{session.session_id}.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # a last line without its end is torn
    return list(_readable(path, lines, lambda line: EngineSession(**json.loads(line))))


def append_request(folder: Path, request: RequestUsage) -> None:
    """Add a request to its process's file, in one write: a process that is killed leaves at most its last line torn.

    Raises:
        OSError: it could not be written.
    """
    append_line(folder / f"requests-{request.usage.session_id}.jsonl", request.to_json())


def is_billed(folder: Path, request_id: str, *, since: float, session_id: str) -> bool:
    """Whether another process's record of this request, among its last, costs something.

    Args:
        since: Unix time, by any machine's clock, before which the request was nowhere; older files are not read.
        session_id: of whoever asks.
    """
    own = folder / f"requests-{session_id}.jsonl"
    return any(
        record.usd > 0
        for path in folder.glob("requests-*.jsonl")
        if path != own and path.stat().st_mtime >= since - _CLOCKS_S
        for record in _readable(path, _last_lines_with(path, request_id.encode()), RequestUsage.from_json)
        if record.request_id == request_id
    )


def _last_lines_with(path: Path, text: bytes) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
        return [line for line in file.read().split(b"\n")[:-1] if text in line]


def _readable(path: Path, lines: Iterable[bytes], read: Callable[[bytes], T]) -> Iterator[T]:
    """The records of these lines. One that is none is logged and left out: what all the others say still holds."""
    for line in lines:
        try:
            yield read(line)
        except (PeagleError, ValueError, TypeError) as error:
            _log.error("%s: a line is left out: %s", path, error)


def write_batch(folder: Path, batch: RequestUsage) -> None:
    """Write what a batch used, as the one request of its own session; writing it again changes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_once(folder / f"requests-{batch.usage.session_id}.jsonl", batch.to_json() + b"\n")


class RequestReader:
    """The requests of a ledger that is still being written; each is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}

    def new(self) -> list[RequestUsage]:
        """The requests since the last call. A line without its end is left for the next; one that is no record is
        logged and left out."""
        found: list[RequestUsage] = []
        read_bytes = {}
        for path in sorted(self._folder.glob("requests-*.jsonl")):
            lines = self._new_lines(path)
            read_bytes[path] = self._read_bytes.get(path, 0) + sum(map(len, lines))
            found += _readable(path, lines, RequestUsage.from_json)
        self._read_bytes |= read_bytes  # at the end: where a file cannot be read, all of them are read again
        return found

    def _new_lines(self, path: Path) -> list[bytes]:
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            data = file.read()
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
