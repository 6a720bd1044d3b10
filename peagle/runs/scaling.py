"""The number of engines: allowed, starting, and worth their load.

Pure functions of numbers and sessions.

Ray Data wants another engine whenever all that it has are full and units wait. An engine takes minutes to load, so the
actor that Ray then starts asks `is_worth_loading` first, and loads nothing until the answer is yes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from peagle.economics.usage import EngineSession

_FORMS = "a number of engines, or MIN:MAX"


@dataclass(frozen=True, slots=True)
class EngineRange:
    """From how many to how many engines a run may have.

    >>> str(EngineRange.parse("2:8")), str(EngineRange.parse("4")), EngineRange.parse("4").smallest
    ('2:8', '4', 4)
    """

    smallest: int
    largest: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `N` or `MIN:MAX`.

        Raises:
            ValueError: it is neither.
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(_FORMS)
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def fixed(self) -> int | None:
        """The number, where there is but one."""
        return self.smallest if self.smallest == self.largest else None

    def at_start(self, room: int, num_units: int, calls: int) -> int:
        """Engines that load at once, within the range.

        As many as have room and units to work on.

        Args:
            room: engines that the cluster has room for as it is.
            calls: units that an engine works on at once.
        """
        return max(self.smallest, min(self.largest, room, num_units // calls))

    def __str__(self) -> str:
        return f"{self.smallest}:{self.largest}" if self.fixed is None else str(self.fixed)


def most_at_once(sessions: Iterable[EngineSession]) -> int:
    """The largest number of engines that lived at the same time."""
    sessions = list(sessions)
    return max(
        (sum(one.started_at <= at.started_at < one.last_seen_at for one in sessions) for at in sessions), default=0
    )


def is_worth_loading(sessions: Iterable[EngineSession], num_alive: int, work_done: int, work_left: int) -> bool:
    """Whether one more engine would work for longer than it loads.

    What is left takes the engines that are alive T seconds, at the speed of the run so far. While another one loads for
    L seconds they go on alone, and then share what is left of it with the new one: that works (T - L) * n / (n + 1)
    seconds. What is not known yet is no reason to wait.

    Args:
        sessions: all of the run directory.
        num_alive: engines at work or loading.
        work_done, work_left: of units that are committed and that are not, in whatever unit; not their number, for
            those that are left at the end are the small ones.

    Example: two engines that took 60 s to load, and 300 s of work for both: the new one would work
    (300 - 60) * 2 / 3 = 160 s for its 60 s of load.
    """
    ready = [session for session in sessions if session.busy_s > 0]
    if not num_alive or not ready or not work_done:
        return True
    load_s = sum(session.load_s + session.compile_s for session in ready) / len(ready)
    up_s = sum(session.busy_s + session.idle_s for session in ready)
    left_s = work_left * up_s / work_done / num_alive
    return (left_s - load_s) * num_alive / (num_alive + 1) > load_s
