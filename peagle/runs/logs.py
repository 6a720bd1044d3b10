"""Where the logs of a run are, and how those of a run on S3 get there.

What processes print goes on all the time, and an object cannot be appended to. So the logs of a run on S3 lie in a
temporary folder of each node, and a copy of each goes to `OUT/logs`: when an engine has started or failed to, once a
minute if it grew, and when its process ends. Of a process that is killed the last minute stays behind on its node.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from peagle.private import temporary_folder
from peagle.storage import WRITE_ERRORS, Place, is_remote, write_atomic

COPY_S = 60.0
_MAX_BYTES = 1 << 24


def logs_folder(root: Place) -> Path:
    """Where the processes of this node write the logs of a run."""
    if not is_remote(root):
        return cast(Path, root / "logs")
    return temporary_folder(f"logs-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}")


class LogCopy:
    """Keep a copy of a log in the run directory.

    Only the end of a very long one.

    Args:
        name: of the copy.
    """

    def __init__(self, root: Place, log: Path, name: str) -> None:
        self._log = log
        self._copy = root / "logs" / name if is_remote(root) else None
        self._copied_bytes = -1

    def update(self) -> None:
        """Bring the copy up to date.

        Where that fails, the next time may be better: a log is not worth a run.
        """
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
def copied(root: Place, log: Path, name: str, *, every_s: float = COPY_S) -> Iterator[None]:
    """Keep a copy of `log` while the block lasts, and at its end."""
    copy, ended = LogCopy(root, log, name), threading.Event()

    def keep() -> None:
        while not ended.wait(every_s):
            copy.update()

    if is_remote(root):
        threading.Thread(target=keep, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        copy.update()
