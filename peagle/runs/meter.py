"""An engine's meter: seconds of load, compile, busy and idle; busy by unit.

It reads a clock and counts; it writes nothing. The event loop and the heartbeat thread share it. Durations come from a
monotonic clock, so that a wall clock that is set back or forward changes no account.
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
        """The heartbeat that says this, of an engine process of this host."""
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


_LENT = "-lent"


def new_session_id(*, is_lent: bool = False) -> str:
    """A name that no other engine process has, and that sorts by time.

    Args:
        is_lent: its seconds are those of somebody else's engine, in whose ledger they are paid for.
    """
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}" + _LENT * is_lent


def is_lent(session_id: str) -> bool:
    """Whether a session's seconds are paid for in another ledger."""
    return session_id.endswith(_LENT)


class EngineMeter:
    """A contiguous account of one engine's time from its first second.

    While requests run, time is busy and belongs to their units in proportion to the requests that each has in the
    engine; one of several choices counts once for each. So the units' shares add up to the busy time exactly.

    Example: from 0 to 2 s only unit 1 has a request; from 2 to 4 s unit 1 has one and unit 2 has three. Busy is 4 s:
    unit 1's share is 2 + 2 * 1/4 = 2.5 s, unit 2's is 2 * 3/4 = 1.5 s.

    Args:
        monotonic: the clock for durations, in seconds.
        started: when the engine's process was there, on that clock; now if None.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, started: float | None = None) -> None:
        self._monotonic = monotonic
        self._started = self._last = monotonic() if started is None else started
        self._running: Counter[int] = Counter()
        self._busy_by_unit: defaultdict[int, float] = defaultdict(float)
        self.load_s = self.compile_s = self.busy_s = self.idle_s = 0.0
        self.num_output_tokens = 0
        self._ready = False
        self._lock = threading.RLock()

    def snapshot(self) -> "Snapshot":
        """The account up to now; its four states sum to `elapsed_s`."""
        with self._lock:
            self.tick()
            return Snapshot(
                elapsed_s=self._last - self._started,
                load_s=self.load_s,
                compile_s=self.compile_s,
                busy_s=self.busy_s,
                idle_s=self.idle_s,
                num_output_tokens=self.num_output_tokens,
            )

    def ready(self, compile_s: float) -> None:
        """The engine is up; `compile_s` of the time until now went into compiling."""
        with self._lock:
            self.tick()
            self._ready = True
            self.compile_s = min(compile_s, self.load_s)
            self.load_s -= self.compile_s

    def start(self, unit: int, num_sequences: int = 1) -> None:
        """A request of `unit` enters the engine, where it may take so many slots."""
        with self._lock:
            self.tick()
            self._running[unit] += num_sequences

    def finish(self, unit: int, num_output_tokens: int, num_sequences: int = 1) -> None:
        """A request of `unit` leaves the engine with so many tokens.

        `num_sequences` as at its start.
        """
        with self._lock:
            self.tick()
            self._running[unit] -= num_sequences
            if not self._running[unit]:
                del self._running[unit]
            self.num_output_tokens += num_output_tokens

    def take(self, unit: int) -> float:
        """The busy seconds of `unit`, once."""
        with self._lock:
            self.tick()
            return self._busy_by_unit.pop(unit, 0.0)

    def tick(self) -> None:
        """Account for the time since the last event."""
        with self._lock:
            now = self._monotonic()
            passed, self._last = now - self._last, now
            sequences = self._running.total()
            if not self._ready:
                self.load_s += passed
            elif not sequences:
                self.idle_s += passed
            else:
                self.busy_s += passed
                for unit, count in self._running.items():
                    self._busy_by_unit[unit] += passed * count / sequences


class BilledMeter(EngineMeter):
    """The meter of an engine that is lent.

    Its clock goes on by the seconds that the lender bills.
    Seconds that are billed while no request runs, as of one that was given up, count as idle.
    """

    def __init__(self) -> None:
        self._billed_s = 0.0
        super().__init__(monotonic=lambda: self._billed_s)
        self.ready(0.0)

    def bill(self, busy_s: float) -> None:
        """Add what a request took of an engine's busy seconds."""
        with self._lock:
            self._billed_s += busy_s
            self.tick()
