"""The command's standard streams: unencodable text, and readers that have gone.

It knows streams; it knows no command.
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_CODE = 128 + signal.SIGPIPE  # as a shell tells of a process that the signal ended


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
