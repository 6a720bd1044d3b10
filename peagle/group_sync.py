"""One `fdatasync` for all that was appended to a file since the last one.

A disk takes milliseconds for each, so requests that end at the same time share it. It runs in a thread of its own,
and whoever waits for it is told by a future: an event loop is never held. It knows a file; it does not know what is
in it.
"""

import os
import threading
from concurrent.futures import Future
from pathlib import Path

from peagle.files import sync_folder


class GroupSync:
    """Puts one file on the disk, again and again, for many who append to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[Future[None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_named = False

    def sync(self) -> "Future[None]":
        """Done when all that was written to the file before this call outlasts a power cut.

        The future has an OSError where the disk failed: then nobody knows what of the file is on it.
        """
        done: Future[None] = Future()
        with self._changed:
            self._waiting.append(done)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                # Whoever stopped waiting has cancelled its future; from here on none can.
                group = [done for done in self._waiting if done.set_running_or_notify_cancel()]
                self._waiting = []
            try:
                self._sync()
            except OSError as error:
                for done in group:
                    done.set_exception(error)
            else:
                for done in group:
                    done.set_result(None)

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not self._is_named:  # a new file: its name has to last as well
            sync_folder(self._path.parent)
            self._is_named = True
