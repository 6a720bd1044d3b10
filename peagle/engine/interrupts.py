"""Interrupts that end the start of an engine. It knows signals, and of vLLM what it does to them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _Interrupt(BaseException):
    """What vLLM does not catch."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, and a SIGINT or SIGTERM that interrupts, end what is in here at once.

    vLLM (0.24 and 0.29, `utils/network_utils.py: zmq_socket_ctx`) swallows the KeyboardInterrupt while it waits for its
    core to start. The core has died of the same signal by then, and vLLM goes on to wait ten minutes for its word.

    Raises:
        KeyboardInterrupt: one came, and the handler that was there before raised it. Outside the main thread, or where
            a signal is ignored or has no handler of Python's, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}

    def interrupt(number: int, frame: FrameType | None) -> None:
        try:
            before[number](number, frame)
        except KeyboardInterrupt:
            raise _Interrupt from None

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except _Interrupt:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
