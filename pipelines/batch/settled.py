"""What is made of a finished run, such as its report: of the run as it stands, whoever makes it and however late.

A driver may be stopped while it makes a report, and go on when another one has added a retry and has made a newer
report: it would replace that. So whoever has written looks at the run again, and writes again where it has changed.
It knows the run directory; it does not know what is made.
"""

from collections.abc import Callable
from typing import TypeVar

from pipelines.batch.rundir import RunDirectory

_Made = TypeVar("_Made")


def until_settled(run: RunDirectory, make: Callable[[], _Made]) -> _Made:
    """What `make` has made of the run, the last time that the run did not change meanwhile.

    A run that is not finished afterwards is left as it is: whoever finishes it makes all of this again.
    """
    while True:
        before = _finished(run)
        made = make()
        after = _finished(run)
        if after in (None, before):
            return made


def _finished(run: RunDirectory) -> tuple[int, frozenset[int]] | None:
    """The retries and the units of a finished run; None of another."""
    plan, committed = run.plan(), frozenset(run.committed())
    return (plan.num_retries, committed) if committed.issuperset(unit.unit for unit in plan.units) else None
