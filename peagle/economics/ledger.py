"""The files of a ledger: one for each engine process, replaced by its heartbeats.

    session-ID.parquet     the last heartbeat of an engine process

Bulk keeps a ledger in its run directory and the endpoint in a folder of its own. It knows files and records; what they
cost is `cost.py`.
"""

import io
from pathlib import Path

from peagle.economics.usage import EngineSession, sessions_from_table, sessions_to_table
from peagle.files import write_atomic


def write_session(folder: Path, session: EngineSession) -> None:
    """Replace the heartbeat of one engine process."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(sessions_to_table([session]), sink)
    write_atomic(folder / f"session-{session.session_id}.parquet", sink.getvalue())


def read_sessions(folder: Path) -> list[EngineSession]:
    """The last heartbeat of every engine process that ever wrote here.

    Raises:
        PeagleError: a file is no such record.
    """
    import pyarrow.parquet as pq

    paths = sorted(folder.glob("session-*.parquet"))
    return [session for path in paths for session in sessions_from_table(pq.read_table(path))]
