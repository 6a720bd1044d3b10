"""Interrupts that end the start of an engine, and measurements. It knows signals, and of vLLM what it does to them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Interrupt(BaseException):
    """What vLLM does not catch."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, and a SIGINT from `timeout`, end what is in here at once.

    vLLM (0.24 and 0.29, `utils/network_utils.py: zmq_socket_ctx`) swallows the KeyboardInterrupt while it waits for its
    core to start. The core has died of the same signal by then, and vLLM goes on to wait ten minutes for its word.

    Raises:
        KeyboardInterrupt: one came, and the handler that was there before raised it. Outside the main thread, or where
            SIGINT is ignored or has no handler of Python's, nothing is changed.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)
        except KeyboardInterrupt:
            raise _Interrupt from None

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupt:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM does what SIGINT does at that moment, so that what ends a measurement in order has its turn.

    Outside the main thread, or where SIGINT is ignored or has no handler of Python's, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    # Raised anew, not called: asyncio and `interruptible` have handlers of their own while they run.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
