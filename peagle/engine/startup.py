"""Limit an engine's start in time and make it interruptible, because vLLM waits for its processes without a limit."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from peagle.errors import ConfigError, EngineError

# In vLLM, the variable only limits the wait for the engine's ready message, the last part of a start.
TIMEOUT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
DEFAULT_S = 3600  # time limit of a start
TIMEOUT_PATTERN = r"the engine did not start within \d+ s"
_UNWIND_S = 60.0  # for vLLM to notice that its processes have died


def start_limit_s() -> int:
    """Return the maximum seconds that an engine may take to start. Raises ConfigError if the variable is invalid."""
    value = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_S)
    if not value.strip().isdecimal() or int(value) == 0:
        raise ConfigError(f"{TIMEOUT_VARIABLE}: must be a whole number of seconds above 0, not {value!r}")
    return int(value)


@contextlib.contextmanager
def start_limit(kill_children: Callable[[], None]) -> Iterator[None]:
    """Abort the block after its time limit by killing the processes it waits for.

    If the block still does not end, this process is interrupted, and exits if that does not help.

    Args:
        kill_children: kills all descendants of this process.

    Raises:
        EngineError: the time limit passed.
        ConfigError: see `start_limit_s`.
    """
    limit_s = start_limit_s()
    message = f"the engine did not start within {limit_s} s"
    timed_out, has_ended = threading.Event(), threading.Event()
    starting_thread = threading.current_thread()

    def abort() -> None:
        if has_ended.wait(limit_s):
            return
        timed_out.set()
        kill_children()
        if not has_ended.wait(_UNWIND_S) and starting_thread is threading.main_thread():
            signal.pthread_kill(starting_thread.ident or 0, signal.SIGINT)  # also ends a wait in the kernel
        if not has_ended.wait(_UNWIND_S):
            sys.stdout.write(f"peagle: {message}, and cannot be aborted; this process exits\n")
            sys.stdout.flush()
            os._exit(EngineError.exit_code)

    threading.Thread(target=abort, daemon=True).start()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not timed_out.is_set():
            raise
        hint = f"see the engine's log; increase {TIMEOUT_VARIABLE} if the engine needs more time"
        raise EngineError(message, hint=hint) from error
    finally:
        has_ended.set()


def format_start_warning(warning: str) -> str:
    return f"warning from an engine's start: {warning}"


class _Interrupt(BaseException):
    """An interrupt that vLLM does not catch."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, SIGINT and SIGTERM end the block immediately.

    vLLM (0.24 and 0.29, `utils/network_utils.py: zmq_socket_ctx`) swallows a KeyboardInterrupt while it waits for its
    core to start. The same signal has ended the core, so vLLM would wait for ten minutes.

    Has no effect outside the main thread, or if a signal is ignored or has no Python handler.

    Raises:
        KeyboardInterrupt: a signal arrived, and its previous handler raised this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    previous_handlers = {number: handler for number, handler in handlers.items() if callable(handler)}

    def interrupt(number: int, frame: FrameType | None) -> None:
        try:
            previous_handlers[number](number, frame)
        except KeyboardInterrupt:
            raise _Interrupt from None

    for number in previous_handlers:
        signal.signal(number, interrupt)
    try:
        yield
    except _Interrupt:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
