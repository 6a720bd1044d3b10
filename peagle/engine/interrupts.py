"""An interrupt that ends the start of an engine. It knows signals, and of vLLM only what it does to them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class _Interrupt(BaseException):
    """What vLLM does not catch."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, and a SIGINT from `timeout`, end what is in here at once.

    vLLM (0.24 and 0.29, `utils/network_utils.py: zmq_socket_ctx`) swallows the KeyboardInterrupt while it waits for its
    core to start. The core has died of the same signal by then, and vLLM goes on to wait ten minutes for its word.

    Raises:
        KeyboardInterrupt: one came. Outside the main thread, or where somebody else handles the signal, nothing is
            changed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except _Interrupt:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(*_: Any) -> None:
    raise _Interrupt
