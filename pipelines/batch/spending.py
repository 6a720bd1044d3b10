"""What a run directory has cost up to this moment, while engines are at work.

Heartbeats tell what an engine's life was when it wrote them; between two of them it goes on costing. It knows sessions
and a price, and reads one monotonic clock; it reads no files.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from peagle.economics.cost import account
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, UnitUsage
from pipelines.batch.heartbeats import Heartbeats


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
        self.heartbeats = Heartbeats(
            (session.session_id for session in sessions), heartbeat_s=heartbeat_s, monotonic=monotonic
        )
        self._price = price
        self._before_usd = account(usages, sessions, price).total_usd
        self.usd = self._before_usd

    def observe(self, sessions: Sequence[EngineSession]) -> float:
        """All dollars, given the heartbeats as they are now."""
        self.heartbeats.observe(sessions)
        here = self.heartbeats.of_this_attempt(sessions)
        device_s = sum(self.heartbeats.life_s(session) * session.num_devices for session in here)
        self.usd = self._before_usd + device_s * self._price.usd_per_device_s
        return self.usd
