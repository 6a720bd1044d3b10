"""A measurement and its report, which is written however the measurement ends. It knows what both have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from peagle.measurement.engine_up import Listener


class Measuring(Protocol):
    """What one command measures, part by part."""

    @property
    def done(self) -> Mapping[Any, Any]:
        """The parts that are finished, by this command and earlier ones."""

    def measure(self) -> None:
        """Do the others."""

    def write_report(self) -> dict[str, Any]:
        """What was measured so far; it lies in the folder, too."""


def reported(run: Measuring, root: Path, listener: Listener, *, parts: str) -> dict[str, Any]:
    """Measure, and write the report.

    Args:
        root: the folder that holds it.
        parts: what they are called: "cells".

    Raises:
        BaseException: whatever ended it, an interrupt, too; the report of the parts that were finished is there.
    """
    try:
        run.measure()
    except BaseException:
        if run.done:
            run.write_report()
            listener.say(f"report of the finished {parts}: {root / 'report.md'}")
        raise
    return run.write_report()
