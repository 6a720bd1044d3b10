"""SIGINT and SIGTERM: interrupt this process, or ask it to stop.

Whoever ends a process group often tells the process twice: `timeout`, wrappers such as `uv run`, and a terminal with a
wrapper in between. So what comes within a second of a signal is the same wish.
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

STOPPED_CODE = 3
"""The exit code of what a signal has stopped."""
_SAME_WISH_S = 1.0
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class _Handler:
    """Calls `act` at a signal, but not at those that come with it.

    Args:
        before: the handler whose place it takes; what that one has just heard is the same wish here.
    """

    def __init__(self, act: Callable[[], object], before: object) -> None:
        self._act = act
        self.heard_at: list[float] = before.heard_at if isinstance(before, _Handler) else [-math.inf]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.heard_at[0] >= _SAME_WISH_S:
            self.heard_at[0] = now
            self._act()


@contextlib.contextmanager
def interrupted_by_signal() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, so that cleanup runs.

    Elsewhere than in the main thread, signals are left as they are; and a signal that is ignored stays so.
    """
    with _handled_by(_interrupt):
        yield


@contextlib.contextmanager
def stop_on_signal(stop: threading.Event, *, last_words: str) -> Iterator[None]:
    """Set `stop` on SIGINT and SIGTERM.

    A second one, a second later or more, ends the process at once.

    Elsewhere than in the main thread, signals are left as they are; and a signal that is ignored stays so.

    Args:
        last_words: printed by the second one.
    """

    def ask() -> None:
        if stop.is_set():
            with contextlib.suppress(OSError, ValueError):  # not `print`: the signal may have come in one
                os.write(sys.stdout.fileno(), f"\n{last_words}\n".encode(errors="backslashreplace"))
            os._exit(STOPPED_CODE)  # as after kill -9: Ray's processes go with this one
        stop.set()

    with _handled_by(ask):
        yield


def interrupt_on_signal() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM from now on.

    Not where they are ignored. For the main thread.

    While the interpreter ends they do nothing: one that comes with a signal that was heard changes no exit code.
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
    before = _install(act)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install(act: Callable[[], object]) -> dict[int, Any]:
    """The handlers that were there before, by signal."""
    found: dict[int, Any] = {number: signal.getsignal(number) or signal.SIG_DFL for number in _NUMBERS}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
    handler = _Handler(act, before.get(signal.SIGTERM))
    for number in before:
        signal.signal(number, handler)
    return before
