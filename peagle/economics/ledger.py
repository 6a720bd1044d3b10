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
from dataclasses import asdict
from pathlib import Path

from peagle.economics.usage import (
    EngineSession,
    RequestUsage,
    session_since,
    sessions_from_table,
    sessions_to_table,
)
from peagle.errors import PeagleError
from peagle.storage import Place, write_atomic, write_once


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
    """Keep a heartbeat beside those before it."""
    with (folder / f"beats-{session.session_id}.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(asdict(session)).encode() + b"\n")


def read_sessions_since(folder: Path, since: float) -> list[EngineSession]:
    """What every engine process did after a Unix time, to the minute; those that had ended are left out.

    Raises:
        PeagleError: a file is no such record.
    """
    found = []
    for session in read_sessions(folder):
        if session.last_seen_at <= since:
            continue
        earlier = [beat for beat in _beats(folder, session) if beat.last_seen_at <= since]
        found.append(session_since(session, earlier[-1]) if earlier else session)
    return found


def _beats(folder: Path, session: EngineSession) -> list[EngineSession]:
    path = folder / f"beats-{session.session_id}.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # a last line without its end is torn
    try:
        return [EngineSession(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise PeagleError(f"{path}: not heartbeats: {error}") from error


def append_request(folder: Path, request: RequestUsage) -> None:
    """Add a request to its process's file, in one write: a process that is killed leaves at most its last line torn."""
    path = folder / f"requests-{request.usage.session_id}.jsonl"
    with path.open("ab", buffering=0) as file:
        file.write(request.to_json() + b"\n")


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
        """The requests since the last call. A line without its end is left for the next.

        Raises:
            PeagleError: a whole line is no such record.
        """
        return [
            RequestUsage.from_json(line)
            for path in sorted(self._folder.glob("requests-*.jsonl"))
            for line in self._new_lines(path)
        ]

    def _new_lines(self, path: Path) -> list[bytes]:
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
        return whole.splitlines()
