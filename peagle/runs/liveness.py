"""Determine from heartbeats which engines of a run are alive, and how fast they are."""

import time
from collections.abc import Callable, Iterable

from peagle.economics.usage import EngineSession

_DEAD_AFTER_BEATS = 2.0  # missed heartbeats


def tokens_per_s(alive: Iterable[EngineSession]) -> float | None:
    """Return the total output tokens per second of these engines; None before the first engine has loaded."""
    loaded = loaded_engines(alive)
    return sum(s.num_output_tokens / (s.busy_s + s.idle_s) for s in loaded) if loaded else None


def loaded_engines(alive: Iterable[EngineSession]) -> list[EngineSession]:
    """Return the live engines that have loaded."""
    return [session for session in alive if session.busy_s + session.idle_s > 0]


def live_sessions(sessions: Iterable[EngineSession], *, since: float, silent_after_s: float) -> list[EngineSession]:
    """Return the latest session for each host and engine number, if it is alive.

    A session is dead if it has ended, or if its last heartbeat is `silent_after_s` older than the start of the driver
    (`since`) or than the latest heartbeat of any engine.
    """
    last_sessions = {
        (session.hostname, session.engine_index): session for session in sorted(sessions, key=lambda s: s.started_at)
    }
    latest = max([since, *(session.last_seen_at for session in last_sessions.values())])
    return [s for s in last_sessions.values() if not s.ended and s.last_seen_at > latest - silent_after_s]


class Heartbeats:
    """The engines' heartbeats, as observed by the driver. `before` are the ids of earlier attempts' sessions, all dead.

    Clocks of different machines are not compared: the age of a heartbeat is measured with the driver's monotonic clock.
    (`peagle status` only reads once, so it must trust the engines' clocks.)
    """

    def __init__(
        self, before: Iterable[str], *, heartbeat_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._before = frozenset(before)
        self._silent_after_s = _DEAD_AFTER_BEATS * heartbeat_s
        self._monotonic = monotonic
        self._beats: dict[str, tuple[float, float]] = {}  # lifetime at the last new heartbeat, and when it was seen

    def of_this_attempt(self, sessions: Iterable[EngineSession]) -> list[EngineSession]:
        return [session for session in sessions if session.session_id not in self._before]

    def observe(self, sessions: Iterable[EngineSession]) -> None:
        """Record when heartbeats changed."""
        for session in self.of_this_attempt(sessions):
            last_lifetime_s, _ = self._beats.get(session.session_id, (None, 0.0))
            if last_lifetime_s != _recorded_lifetime_s(session):
                self._beats[session.session_id] = _recorded_lifetime_s(session), self._monotonic()

    def alive(self, sessions: Iterable[EngineSession]) -> list[EngineSession]:
        """Return the live engines of this attempt, as of the last `observe`."""
        return [
            session
            for session in self.of_this_attempt(sessions)
            if not session.ended and self._silence_s(session) <= self._silent_after_s
        ]

    def lifetime_s(self, session: EngineSession) -> float:
        """Return how long an engine has run. A silent engine counts as running for at most two heartbeat intervals."""
        silence_s = 0.0 if session.ended else min(self._silence_s(session), self._silent_after_s)
        return _recorded_lifetime_s(session) + silence_s

    def _silence_s(self, session: EngineSession) -> float:
        now = self._monotonic()
        _, seen_at = self._beats.get(session.session_id, (0.0, now))
        return now - seen_at


def _recorded_lifetime_s(session: EngineSession) -> float:
    return session.last_seen_at - session.started_at
