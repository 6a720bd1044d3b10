"""Keep other people's log floods off the terminal.

Ray and vLLM write to the standard error of the process and of its children, partly from C++, so no Python logger can
hold them back. While a run lasts, that descriptor is a file; peagle itself speaks on standard output.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self


class QuietStderr:
    """Standard error goes to a file between enter and exit.

    First to a temporary one, then to the one given to `move_to`.
    """

    def __enter__(self) -> Self:
        self._terminal = _duplicate_stderr()
        self._log: BinaryIO = tempfile.TemporaryFile()
        os.dup2(self._log.fileno(), 2)
        return self

    def move_to(self, path: Path) -> None:
        """Continue in `path`, after what was written so far."""
        sys.stderr.flush()
        log = path.open("ab")
        self._log.seek(0)
        shutil.copyfileobj(self._log, log)
        log.flush()
        os.dup2(log.fileno(), 2)
        self._log.close()
        self._log = log

    def tell(self, text: str) -> None:
        """Print a line where standard error was before."""
        os.write(self._terminal, f"{text}\n".encode(errors="replace"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr.flush()
        os.dup2(self._terminal, 2)
        os.close(self._terminal)
        self._log.close()


def _duplicate_stderr() -> int:
    sys.stderr.flush()
    return os.dup(2)
