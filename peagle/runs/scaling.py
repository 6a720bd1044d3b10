"""Choose the number of engines of a run. Pure functions.

Ray Data adds an actor whenever all engines are full and units wait. The actor loads its engine only once
`is_worth_loading` is true.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from peagle.economics.usage import EngineSession


@dataclass(frozen=True, slots=True)
class EngineRange:
    """The minimum and maximum number of engines.

    >>> str(EngineRange.parse("2:8")), str(EngineRange.parse("4")), EngineRange.parse("4").smallest
    ('2:8', '4', 4)
    """

    smallest: int
    largest: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `N` or `MIN:MAX`, or raise ValueError."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError("a number of engines, or MIN:MAX")
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def fixed(self) -> int | None:
        """The number of engines if it is fixed, or None."""
        return self.smallest if self.smallest == self.largest else None

    def initial_number(self, room: int, num_units: int, units_per_engine: int) -> int:
        """Return the number of engines to start with. `room` is the number of engines that fit in the cluster."""
        return max(self.smallest, min(self.largest, room, num_units // units_per_engine))

    def __str__(self) -> str:
        return f"{self.smallest}:{self.largest}" if self.fixed is None else str(self.fixed)


def max_concurrent_engines(sessions: Iterable[EngineSession]) -> int:
    """Return the largest number of engines that were alive at the same time."""
    sessions = list(sessions)
    starts = [session.started_at for session in sessions]
    return max((sum(s.started_at <= start < s.last_seen_at for s in sessions) for start in starts), default=0)


def is_worth_loading(sessions: Iterable[EngineSession], num_alive: int, work_done: int, work_left: int) -> bool:
    """Return whether another engine would work for longer than it takes to load.

    The n live engines need T seconds for the remaining work. If another engine loads for L seconds and then shares this
    work, it works for (T - L) * n / (n + 1) seconds. Returns True as long as T or L is unknown. `work_done` and
    `work_left` are sums of `WorkUnit.work`, not numbers of units, because small units come last.

    Example: two engines took 60 s to load and have 300 s of work left. A third engine would work (300 - 60) * 2 / 3 =
    160 s after 60 s of loading.
    """
    ready = [session for session in sessions if session.busy_s > 0]
    if not num_alive or not ready or not work_done:
        return True
    load_s = sum(session.load_s + session.compile_s for session in ready) / len(ready)
    up_s = sum(session.busy_s + session.idle_s for session in ready)
    left_s = work_left * up_s / work_done / num_alive
    return (left_s - load_s) * num_alive / (num_alive + 1) > load_s
