"""Which engines of an attempt are alive, by when their heartbeats were last seen to change.

Machines' clocks are not compared: a heartbeat is news or not, and one monotonic clock says how old the news is. It
knows sessions, and reads no files.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peagle.economics.usage import EngineSession

_DEAD_AFTER = 2.0  # heartbeats: an engine that misses two is dead, and a dead one costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    life_s: float
    seen_at: float


class Heartbeats:
    """What was heard of the engines.

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
        """Engines of this attempt that are loading or at work, by the heartbeats that were last observed."""
        return [
            session
            for session in self.of_this_attempt(sessions)
            if not session.ended and self._unheard_s(session) <= self._silent_after_s
        ]

    def life_s(self, session: EngineSession) -> float:
        """How long an engine has lived: to its end, else to now, and no longer than a dead one may have lived on."""
        unheard_s = 0.0 if session.ended else min(self._unheard_s(session), self._silent_after_s)
        return _life_s(session) + unheard_s

    def _unheard_s(self, session: EngineSession) -> float:
        beat = self._beats.get(session.session_id)
        return 0.0 if beat is None else self._monotonic() - beat.seen_at


def _life_s(session: EngineSession) -> float:
    return session.last_seen_at - session.started_at
