"""Measure an engine's seconds by state (load, compile, busy, idle), and busy seconds also by unit.

Meters are thread-safe and use a monotonic clock, so changes of the system time do not matter.
"""

import socket
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

from peagle.economics.usage import EngineFacts, EngineSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An engine's account at one moment, in seconds and generated tokens."""

    elapsed_s: float
    load_s: float
    compile_s: float
    busy_s: float
    idle_s: float
    num_output_tokens: int

    def to_session(
        self,
        session_id: str,
        facts: EngineFacts,
        *,
        engine_index: int,
        started_at: float,
        ended: bool,
        self_check: str,
        start_warnings: str,
    ) -> EngineSession:
        return EngineSession(
            session_id=session_id,
            engine_index=engine_index,
            hostname=socket.gethostname(),
            started_at=started_at,
            last_seen_at=started_at + self.elapsed_s,
            load_s=self.load_s,
            compile_s=self.compile_s,
            busy_s=self.busy_s,
            idle_s=self.idle_s,
            num_output_tokens=self.num_output_tokens,
            ended=ended,
            self_check=self_check,
            start_warnings=start_warnings,
            **asdict(facts),
        )


_LENT_SUFFIX = "-lent"


def new_session_id(*, is_lent: bool = False) -> str:
    """Return a unique id that sorts by time. `is_lent` marks the session of a borrowed engine."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}" + _LENT_SUFFIX * is_lent


def is_lent(session_id: str) -> bool:
    """Return whether a session used a borrowed engine, whose seconds are billed in the ledger of the endpoint."""
    return session_id.endswith(_LENT_SUFFIX)


class EngineMeter:
    """An account of all seconds of one engine since `started`, a time of the clock `monotonic`.

    While requests run, time is busy and is divided among their units in proportion to the number of requests that each
    unit has in the engine; a request with several choices counts once per choice. So the units' shares add up to the
    busy time exactly.

    Example: from 0 to 2 s only unit 1 has a request; from 2 to 4 s unit 1 has one request and unit 2 has three. Busy is
    4 s: unit 1's share is 2 + 2 * 1/4 = 2.5 s, unit 2's is 2 * 3/4 = 1.5 s.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, started: float | None = None) -> None:
        self._monotonic = monotonic
        self._started = self._last_tick = monotonic() if started is None else started
        self._running: Counter[int] = Counter()
        self._busy_by_unit: defaultdict[int, float] = defaultdict(float)
        self.load_s = self.compile_s = self.busy_s = self.idle_s = 0.0
        self.num_output_tokens = 0
        self._ready = False
        self._lock = threading.RLock()

    def snapshot(self) -> "Snapshot":
        """Return the account up to now; the seconds of the four states add up to `elapsed_s`."""
        with self._lock:
            self.tick()
            return Snapshot(
                elapsed_s=self._last_tick - self._started,
                load_s=self.load_s,
                compile_s=self.compile_s,
                busy_s=self.busy_s,
                idle_s=self.idle_s,
                num_output_tokens=self.num_output_tokens,
            )

    def ready(self, compile_s: float) -> None:
        """Record that the engine has started; `compile_s` of the time until now was compilation."""
        with self._lock:
            self.tick()
            self._ready = True
            self.compile_s = min(compile_s, self.load_s)
            self.load_s -= self.compile_s

    def start(self, unit: int, num_sequences: int = 1) -> None:
        """Record that a request of `unit` enters the engine and may use `num_sequences` slots."""
        with self._lock:
            self.tick()
            self._running[unit] += num_sequences

    def finish(self, unit: int, num_output_tokens: int, num_sequences: int = 1) -> None:
        """Record that a request of `unit` leaves the engine."""
        with self._lock:
            self.tick()
            self._running[unit] -= num_sequences
            if not self._running[unit]:
                del self._running[unit]
            self.num_output_tokens += num_output_tokens

    def pop_busy_s(self, unit: int) -> float:
        """Return and reset the busy seconds of `unit`."""
        with self._lock:
            self.tick()
            return self._busy_by_unit.pop(unit, 0.0)

    def tick(self) -> None:
        """Account for the time since the last event."""
        with self._lock:
            now = self._monotonic()
            elapsed_s, self._last_tick = now - self._last_tick, now
            num_running = self._running.total()
            if not self._ready:
                self.load_s += elapsed_s
            elif not num_running:
                self.idle_s += elapsed_s
            else:
                self.busy_s += elapsed_s
                for unit, count in self._running.items():
                    self._busy_by_unit[unit] += elapsed_s * count / num_running


class BilledMeter(EngineMeter):
    """The meter of a borrowed engine. Its clock advances by the seconds that the lender bills.

    Seconds that are billed while no request runs, for example for a cancelled request, count as idle.
    """

    def __init__(self) -> None:
        self._billed_s = 0.0
        super().__init__(monotonic=lambda: self._billed_s)
        self.ready(0.0)

    def bill(self, busy_s: float) -> None:
        """Add a request's share of the engine's busy seconds."""
        with self._lock:
            self._billed_s += busy_s
            self.tick()
