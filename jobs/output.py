"""Output of commands: encoding errors and broken pipes, progress lines, forecasts."""

import argparse
import contextlib
import errno
import io
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from peagle.bench.engine import MeasurementListener

PIPE_CODE = 128 + signal.SIGPIPE  # a shell's exit code for a process that was killed by SIGPIPE
DRY_RUN_HELP = "show what would run and where, with memory, time and cost; start and write nothing"
_REPORT_EVERY_S = 15.0


@contextlib.contextmanager
def standard_streams() -> Iterator[SimpleNamespace]:
    """Escape text that the streams cannot encode. Exit as if killed by SIGPIPE if standard output has no reader.

    Yields:
        A namespace in which the command sets its exit `code`; on exit it may become `PIPE_CODE`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    result = SimpleNamespace(code=0)
    try:
        yield result
    finally:  # even when argparse exits after --help
        try:
            sys.stdout.flush()
        except BrokenPipeError as error:
            result.code = broken_pipe(str(error))


def broken_pipe(message: str) -> int:
    """Return the exit code after a BrokenPipeError; print `message` unless standard output is the broken pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        print(message, file=sys.stderr)
        return 1
    devnull = os.open(os.devnull, os.O_WRONLY)  # otherwise the interpreter prints an error at exit
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return PIPE_CODE


def console(**options: Any) -> "Console":
    """Return a rich console that raises BrokenPipeError. Rich's own console would exit the process with code 1."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return PipeConsole(**options)


def prints_unicode() -> bool:
    """Whether standard output can encode all of Unicode."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def is_unicode(text: str) -> bool:
    """Whether the text is valid Unicode. Python decodes the invalid bytes of an argument as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Throttle:
    """Limits a progress callback to one call every few seconds. The first and the last call are always passed on."""

    def __init__(self, report: Any) -> None:
        self._report, self._reported_at = report, float("-inf")

    def __call__(self, *progress: Any) -> None:
        """Take the finished and the total number as `progress`, or a record with `step` and `num_steps`."""
        num_done, total = (progress[0].step, progress[0].num_steps) if len(progress) == 1 else progress
        if num_done == total or time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = time.monotonic()
            self._report(*progress)


def listener() -> "MeasurementListener":
    """Return a listener that prints the progress of a measurement."""
    from peagle.bench.engine import MeasurementListener

    return MeasurementListener(
        say=say, progress=Throttle(lambda num_done, total: say(f"  {num_done} of {total} responses"))
    )


def say(message: str) -> None:
    """Print a line and flush it."""
    print(message, flush=True)


@contextlib.contextmanager
def human_output(args: argparse.Namespace) -> Iterator[None]:
    """With `--json -`, redirect a command's prints to standard error, so that standard output is only JSON."""
    if str(args.json) != "-":
        yield
        return
    # A copy of standard error: while an engine is running, descriptor 2 is the engine's log (`peagle.quiet`).
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with terminal, contextlib.redirect_stdout(terminal):
        yield


class Forecast(Protocol):
    """A resolved run or endpoint that has not been started."""

    def lines(self) -> list[tuple[str, str]]:
        """Return labels and facts to print."""

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast for --json."""


def print_forecast(forecast: Forecast) -> tuple[int, dict[str, Any]]:
    """Print the facts; return the exit code and the result for --json."""
    lines = forecast.lines()
    width = max(len(label) for label, _ in lines)
    for label, fact in lines:
        print(f"{label:<{width}}  {fact}")
    print("dry run: nothing was started or written")
    return 0, forecast.to_dict()
