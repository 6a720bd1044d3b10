"""A command's output: streams that cannot break it, and lines for people."""

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

PIPE_CODE = 128 + signal.SIGPIPE  # as a shell tells of a process that the signal ended
DRY_RUN_HELP = "say what would run where, what memory, time and money it would take, and start and write nothing"
_REPORT_EVERY_S = 15.0


@contextlib.contextmanager
def standard_streams() -> Iterator[SimpleNamespace]:
    """Run a command with standard streams that cannot break it.

    Text that cannot be encoded is escaped; a reader that has gone ends the command like SIGPIPE.

    Yields:
        Where the command leaves its exit code as `code`; it may have become `PIPE_CODE` at the end.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    ended = SimpleNamespace(code=0)
    try:
        yield ended
    finally:  # argparse ends the process after --help by itself
        try:
            sys.stdout.flush()
        except BrokenPipeError as error:
            ended.code = broken_pipe(str(error))


def broken_pipe(message: str) -> int:
    """The exit code of a command that met a broken pipe.

    `message` is printed where the pipe was not that of its output.
    """
    if not _is_reader_gone():
        print(message, file=sys.stderr)
        return 1
    nowhere = os.open(os.devnull, os.O_WRONLY)  # else the interpreter tells of it at its end
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return PIPE_CODE


def console(**options: Any) -> "Console":
    """Rich's console.

    Its own one ends the process with 1 when nobody reads, whatever the command is in.
    """
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Ours(**options)


def prints_unicode() -> bool:
    """Whether standard output takes any letter as it is."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def is_unicode(text: str) -> bool:
    """Whether the name is all text.

    Other bytes appear as half surrogate pairs in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_reader_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class Throttle:
    """Let a report through every few seconds, and the first and last one always."""

    def __init__(self, report: Any) -> None:
        self._report, self._last = report, float("-inf")

    def __call__(self, *news: Any) -> None:
        """`news` is `done` and `total`, or one record that has `step` and `num_steps`."""
        done, total = (news[0].step, news[0].num_steps) if len(news) == 1 else news
        if done == total or time.monotonic() - self._last >= _REPORT_EVERY_S:
            self._last = time.monotonic()
            self._report(*news)


def listener() -> "MeasurementListener":
    """A measurement's news on the terminal."""
    from peagle.bench.engine import MeasurementListener

    return MeasurementListener(say=say, progress=Throttle(lambda done, total: say(f"  {done} of {total} responses")))


def say(message: str) -> None:
    """A line that is seen at once, also in a pipe."""
    print(message, flush=True)


@contextlib.contextmanager
def human_output(args: argparse.Namespace) -> Iterator[None]:
    """Keep standard output for data alone while a command runs with `--json -`.

    What it prints goes to standard error as that is now: while an engine is up, the descriptor is its log
    (`peagle.quiet`).
    """
    if str(args.json) != "-":
        yield
        return
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with terminal, contextlib.redirect_stdout(terminal):
        yield


class Forecast(Protocol):
    """A run or an endpoint that was only decided."""

    def lines(self) -> list[tuple[str, str]]:
        """The facts to show, by label."""

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""


def print_forecast(forecast: Forecast) -> tuple[int, dict[str, Any]]:
    """Print the facts; the exit code, and the result as data."""
    lines = forecast.lines()
    width = max(len(label) for label, _ in lines)
    for label, fact in lines:
        print(f"{label:<{width}}  {fact}")
    print("dry run: nothing was started or written")
    return 0, forecast.to_dict()
