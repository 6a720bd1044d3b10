"""The number of engines: allowed, alive, starting, and worth their load.

Pure functions of numbers and heartbeats. It knows neither Ray nor files.

Ray Data wants another engine whenever all that it has are full and units wait. An engine takes minutes to load, so the
actor that Ray then starts asks `is_worth_loading` first, and loads nothing until the answer is yes.

Machines' clocks are not compared: a heartbeat is news or not, and one monotonic clock says how old the news is.
"""

import re
import time
from collections.abc import Callable, Iterable
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


_DEAD_AFTER = 2.0  # heartbeats: an engine that misses two is dead, and a dead one costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    life_s: float
    seen_at: float


class Heartbeats:
    """The engines' heartbeats, and which engines are alive.

    Args:
        before: sessions of earlier attempts; none of them is alive.
        heartbeat_s: seconds between an engine's heartbeats.
        monotonic: the clock for what passed since a heartbeat was seen.
    """

    def __init__(
        self, before: Iterable[str], *, heartbeat_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._before = frozenset(before)
        self._silent_after_s = _DEAD_AFTER * heartbeat_s
        self._monotonic = monotonic
        self._beats: dict[str, _Beat] = {}

    def of_this_attempt(self, sessions: Iterable[EngineSession]) -> list[EngineSession]:
        """Those that were not there before; no clock is asked."""
        return [session for session in sessions if session.session_id not in self._before]

    def observe(self, sessions: Iterable[EngineSession]) -> None:
        """Take note of the heartbeats as they are now."""
        for session in self.of_this_attempt(sessions):
            beat = self._beats.get(session.session_id)
            if beat is None or beat.life_s != _life_s(session):
                self._beats[session.session_id] = _Beat(life_s=_life_s(session), seen_at=self._monotonic())

    def alive(self, sessions: Iterable[EngineSession]) -> list[EngineSession]:
        """Engines of this attempt that load or work, by the last observed heartbeats."""
        return [
            session
            for session in self.of_this_attempt(sessions)
            if not session.ended and self._unheard_s(session) <= self._silent_after_s
        ]

    def life_s(self, session: EngineSession) -> float:
        """An engine's life in seconds: to its end, else to now.

        No longer than a dead one may have lived on.
        """
        unheard_s = 0.0 if session.ended else min(self._unheard_s(session), self._silent_after_s)
        return _life_s(session) + unheard_s

    def _unheard_s(self, session: EngineSession) -> float:
        beat = self._beats.get(session.session_id)
        return 0.0 if beat is None else self._monotonic() - beat.seen_at


def _life_s(session: EngineSession) -> float:
    return session.last_seen_at - session.started_at
