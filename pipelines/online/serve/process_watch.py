"""Report crashes and restarts of Serve's controller and proxies, and their effect.

Ray and Serve restart both without a message.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping

from pipelines.online.serve.ray_names import serve_processes

_POLL_S = 2.0
_TOO_LONG_S = 60.0
_CONSEQUENCES = {
    "controller": "requests continue, only scaling is delayed; Ray restarts it",
    "proxy": "its connections were cut, and new connections are refused until Serve has restarted it",
}


class ProcessWatch:
    """Compares Serve's processes, by kind, with those of the previous check."""

    def __init__(
        self,
        processes: Callable[[], Mapping[Hashable, str]],
        report: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._report, self._monotonic = processes, report, monotonic
        self._known = dict(processes())
        self._died_at: dict[str, float] = {}
        self._is_reported: set[str] = set()

    def check(self) -> None:
        """Report processes that ended or came back since the previous check."""
        now, processes = self._monotonic(), dict(self._processes())
        ended = [self._known[process] for process in self._known.keys() - processes.keys()]
        new = [processes[process] for process in processes.keys() - self._known.keys()]
        self._known = processes
        for kind in ended:
            self._died_at[kind] = now
            self._report(f"Serve's {kind} died: {_CONSEQUENCES[kind]}. No action is needed")
        for kind in new:
            if (died_at := self._died_at.pop(kind, None)) is not None:
                self._is_reported.discard(kind)
                self._report(f"Serve's {kind} is back after {now - died_at:.0f} s")
        for kind, died_at in self._died_at.items():
            if now - died_at >= _TOO_LONG_S and kind not in self._is_reported:
                self._is_reported.add(kind)
                self._report(
                    f"Serve's {kind} is not back after {_TOO_LONG_S:g} s: stop this command and start it again; usage, "
                    "files and batches are saved"
                )


def watch_processes(stopped: threading.Event, report: Callable[[str], None]) -> None:
    watch = ProcessWatch(serve_processes, report)

    def run() -> None:
        while not stopped.wait(_POLL_S):
            watch.check()

    threading.Thread(target=run, name="serve-processes", daemon=True).start()
