"""Redirect standard error to keep the logs of Ray and vLLM off the terminal.

Both libraries write directly to the file descriptor, even from C++ and child processes, so Python loggers cannot filter
their output.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self


class QuietStderr:
    """Redirects standard error to a temporary file, and after `move_to` to a named file."""

    def __enter__(self) -> Self:
        sys.stderr.flush()
        self._terminal = os.dup(2)
        self._log: BinaryIO = tempfile.TemporaryFile()
        os.dup2(self._log.fileno(), 2)
        return self

    def move_to(self, path: Path) -> None:
        """Append the previous output to `path`, and redirect standard error to this file."""
        sys.stderr.flush()
        log = path.open("ab")
        self._log.seek(0)
        shutil.copyfileobj(self._log, log)
        log.flush()
        os.dup2(log.fileno(), 2)
        self._log.close()
        self._log = log

    def print_to_terminal(self, text: str) -> None:
        """Print a line to the original standard error."""
        os.write(self._terminal, f"{text}\n".encode(errors="replace"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr.flush()
        os.dup2(self._terminal, 2)
        os.close(self._terminal)
        self._log.close()
