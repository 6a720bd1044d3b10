"""The logs of a run.

If the run directory is on S3, processes log to a local temporary folder, and copy the log to `OUT/logs` every minute.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from peagle.private import temporary_folder
from peagle.storage import WRITE_ERRORS, StoragePath, is_remote, write_atomic

COPY_S = 60.0
_MAX_BYTES = 1 << 24


def logs_folder(root: StoragePath) -> Path:
    """Return the local folder of a run's logs."""
    if not is_remote(root):
        return cast(Path, root / "logs")
    return temporary_folder(f"logs-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}")


class LogCopy:
    """A copy of a log in a run directory on S3, limited to the last 16 MiB."""

    def __init__(self, root: StoragePath, log: Path, name: str) -> None:
        self._log = log
        self._copy = root / "logs" / name if is_remote(root) else None
        self._copied_bytes = -1

    def update(self) -> None:
        """Update the copy. Errors are ignored: the next update may succeed."""
        if self._copy is None:
            return
        with contextlib.suppress(*WRITE_ERRORS):
            size = self._log.stat().st_size
            if size > self._copied_bytes:
                with self._log.open("rb") as file:
                    file.seek(max(0, size - _MAX_BYTES))
                    write_atomic(self._copy, file.read(_MAX_BYTES))
                self._copied_bytes = size


@contextlib.contextmanager
def copy_log(root: StoragePath, log: Path, name: str, *, every_s: float = COPY_S) -> Iterator[None]:
    """Update the copy of `log` during the block and at its end."""
    copy, ended = LogCopy(root, log, name), threading.Event()

    def copy_repeatedly() -> None:
        while not ended.wait(every_s):
            copy.update()

    if is_remote(root):
        threading.Thread(target=copy_repeatedly, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        copy.update()
