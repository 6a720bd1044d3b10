"""What a run directory has cost up to this moment, while engines are at work.

Heartbeats tell what an engine's life was when it wrote them; between two of them it goes on costing. It knows sessions
and a price, and reads one monotonic clock; it reads no files.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peagle.economics.cost import account
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, UnitUsage

_SILENT_AFTER = 2.0  # heartbeats: an engine that misses two is dead, and a dead one costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    life_s: float
    seen_at: float


class Spending:
    """Dollars of earlier attempts, exactly, and of this one up to the present moment.

    Args:
        usages, sessions: of the run directory before this attempt started an engine.
        heartbeat_s: seconds between an engine's heartbeats.
        monotonic: the clock for what passed since a heartbeat was seen.
    """

    def __init__(
        self,
        usages: Iterable[UnitUsage],
        sessions: Iterable[EngineSession],
        price: Price,
        *,
        heartbeat_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        sessions = list(sessions)
        self._before = {session.session_id for session in sessions}
        self._price = price
        self._before_usd = account(usages, sessions, price).total_usd
        self._heartbeat_s = heartbeat_s
        self._monotonic = monotonic
        self._beats: dict[str, _Beat] = {}
        self.usd = self._before_usd

    def of_this_attempt(self, sessions: Iterable[EngineSession]) -> list[EngineSession]:
        """Those that were not there before; no clock is asked."""
        return [session for session in sessions if session.session_id not in self._before]

    def observe(self, sessions: Iterable[EngineSession]) -> float:
        """All dollars, given the heartbeats as they are now."""
        device_s = sum(self._life_s(session) * session.num_devices for session in self.of_this_attempt(sessions))
        self.usd = self._before_usd + device_s * self._price.usd_per_device_s
        return self.usd

    def alive(self, sessions: Iterable[EngineSession]) -> list[EngineSession]:
        """Engines of this attempt that are loading or at work, by the heartbeats that were last observed."""
        return [session for session in self.of_this_attempt(sessions) if self._is_alive(session)]

    def _is_alive(self, session: EngineSession) -> bool:
        beat = self._beats.get(session.session_id)
        heard_s = 0.0 if beat is None else self._monotonic() - beat.seen_at
        return not session.ended and heard_s <= _SILENT_AFTER * self._heartbeat_s

    def _life_s(self, session: EngineSession) -> float:
        life_s, now = session.last_seen_at - session.started_at, self._monotonic()
        if session.ended:
            return life_s
        beat = self._beats.get(session.session_id)
        if beat is None or beat.life_s != life_s:
            beat = self._beats[session.session_id] = _Beat(life_s=life_s, seen_at=now)
        return life_s + min(now - beat.seen_at, _SILENT_AFTER * self._heartbeat_s)
