"""SIGINT and SIGTERM: interrupt this process, or ask it to stop.

The command `timeout`, wrappers such as `uv run`, and terminals often signal a process twice, so signals within a
second count as one.
"""

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPPED_CODE = 3  # exit code of a command that a signal stopped


class _Handler:
    """Calls `act` on a signal, but ignores repeated signals within a second.

    A signal that the replaced handler `previous` received also starts the second.
    """

    def __init__(self, act: Callable[[], object], previous: object) -> None:
        self._act = act
        self.last_at: list[float] = previous.last_at if isinstance(previous, _Handler) else [-math.inf]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.last_at[0] >= 1.0:
            self.last_at[0] = now
            self._act()


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, so that cleanup runs.

    Has no effect outside the main thread or on signals that the process ignores.
    """
    with _handled_by(_interrupt):
        yield


@contextlib.contextmanager
def stop_on_signal(stop: threading.Event, *, message: str) -> Iterator[None]:
    """Set `stop` on SIGINT and SIGTERM; on a second signal, print `message` and exit immediately.

    Has no effect outside the main thread or on signals that the process ignores.
    """

    def request_stop() -> None:
        if stop.is_set():
            # Not `print`, which the signal may have interrupted.
            with contextlib.suppress(OSError, ValueError):
                os.write(sys.stdout.fileno(), f"\n{message}\n".encode(errors="backslashreplace"))
            os._exit(STOPPED_CODE)  # Ray's processes then exit by themselves, as after kill -9
        stop.set()

    with _handled_by(request_stop):
        yield


def install_signal_handlers() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM from now on, unless they are ignored. Call it in the main thread.

    While the interpreter exits, both signals are ignored, so that a repeated signal does not change the exit code.
    """
    numbers = _install(_interrupt)
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in numbers])


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _handled_by(act: Callable[[], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = _install(act)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _install(act: Callable[[], object]) -> dict[int, Any]:
    """Install a handler; return the previous handlers by signal."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    current: dict[int, Any] = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    previous = {number: handler for number, handler in current.items() if handler is not signal.SIG_IGN}
    handler = _Handler(act, previous.get(signal.SIGTERM))
    for number in previous:
        signal.signal(number, handler)
    return previous
