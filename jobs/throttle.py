"""Progress for people on the terminal, at most a line every few seconds."""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.bench.engine import MeasurementListener

_REPORT_EVERY_S = 15.0


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
    """Where a command runs.

    With `--json -` what it prints goes to standard error, so that data alone is left.

    That is standard error as it is now: while an engine is up, the descriptor is its log (`peagle.quiet`).
    """
    if str(args.json) != "-":
        yield
        return
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with terminal, contextlib.redirect_stdout(terminal):
        yield
