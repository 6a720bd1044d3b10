"""Signals that ask a run to stop."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from peagle.errors import StoppedEarly


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask for a stop, and a second one ends the process at once.

    Elsewhere than in the main thread, signals are left as they are.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(*_: object) -> None:
        if stop.is_set():
            os._exit(StoppedEarly.exit_code)  # as after kill -9: Ray's processes go with this one
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
