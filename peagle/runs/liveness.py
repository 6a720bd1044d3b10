"""Which engines of a run live, and how fast they are; by their heartbeats.

A driver follows heartbeats on a clock of its own. Whoever looks once, from another machine, has to believe the clocks
of others.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peagle.economics.usage import EngineSession

_DEAD_AFTER = 2.0  # heartbeats: an engine that misses two is dead, and a dead one costs nothing


def tokens_per_s(alive: Iterable[EngineSession]) -> float | None:
    """The output tokens a second of these engines together; None before one works."""
    at_work = engines_at_work(alive)
    return sum(s.num_output_tokens / (s.busy_s + s.idle_s) for s in at_work) if at_work else None


def engines_at_work(alive: Iterable[EngineSession]) -> list[EngineSession]:
    """Those of the living engines that have loaded."""
    return [session for session in alive if session.busy_s + session.idle_s > 0]


def seen_alive(sessions: Iterable[EngineSession], *, since: float, silent_after_s: float) -> list[EngineSession]:
    """The last recent session in each place (host and number), at a single look.

    Args:
        since: when the driver began, by its own clock.
        silent_after_s: seconds without a heartbeat after which an engine counts as dead.
    """
    last = {
        (session.hostname, session.engine_index): session for session in sorted(sessions, key=lambda s: s.started_at)
    }
    latest = max([since, *(session.last_seen_at for session in last.values())])
    return [one for one in last.values() if not one.ended and one.last_seen_at > latest - silent_after_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    life_s: float
    seen_at: float


class Heartbeats:
    """The engines' heartbeats as a driver sees them, and which engines are alive.

    Machines' clocks are not compared: a heartbeat is news or not, and one monotonic clock says how old the news is.

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
