"""The watchdog of an engine: silence, a blocked event loop, the grace period of a stop, and time limits of rows.

Signs of life are a counter of steps and finished rows. The event loop of the actor watches the engine, and a thread
watches the event loop.
"""

import asyncio
import faulthandler
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from peagle.engine.interface import Generation, SelfCheck
from peagle.errors import EngineError
from peagle.runs.stopping import GraceClock

ENGINE_TIMEOUT_S = 1800.0
"""Six times what vLLM allows an engine's workers for a step: a kernel that is compiled when it is first needed, or a
step of a large model on a few cores, takes minutes."""
POLL_S = 1.0
"""Interval of checks while rows are in the engine."""
_LONGEST_LOOK_S = 5.0
_MIN_BLOCKED_S = 10.0  # a busy loop on a busy machine answers late
_FINAL_WRITES_S = 150.0  # requests to a store are retried for two minutes
_STDERR = 2
_LOOKS_PER_LIMIT = 20  # how late a time limit may be noticed


class OutOfTime(Exception):  # noqa: N818 - caused by the row
    """A row exceeded its time limit in a working engine."""


class Watchdog:
    """A watchdog of an actor's engine.

    Args:
        signs_of_life: a number that grows with the engine's work.
        limit_s: limit for silence while rows are in the engine, and for a blocked event loop.
        grace: clock of the grace period after a stop.
        is_busy: whether rows are in the engine.
        die: ends this process after recording its rows and a reason.
        leave: ends it immediately.
    """

    def __init__(
        self,
        signs_of_life: Callable[[], int],
        *,
        limit_s: float,
        grace: GraceClock,
        is_busy: Callable[[], bool],
        die: Callable[[str], object],
        leave: Callable[[], object],
    ) -> None:
        self._signs_of_life, self._limit_s, self._grace, self._is_busy = signs_of_life, limit_s, grace, is_busy
        self._die, self._leave = die, leave
        self._silence = SilenceClock(signs_of_life)
        self._loop_watch: LoopWatch | None = None

    def watch_loop(self) -> None:
        """Watch the event loop of the caller, from the first call on."""
        if self._loop_watch is None:
            loop = asyncio.get_running_loop()
            self._loop_watch = LoopWatch(loop, limit_s=self._limit_s, die=self._die, leave=self._leave)

    def is_stopping(self) -> bool:
        """Whether the run is being stopped, so that nothing new is started."""
        return self._grace.is_stopping()

    async def finished(self, work: "asyncio.Task[Any]") -> bool:
        """Wait for the rows of a unit; cancel them and return False when the grace period of a stop is over.

        While waiting, check for silence of the engine. `LoopWatch` checks that this loop runs.
        """
        while not (await asyncio.wait([work], timeout=POLL_S))[0]:
            if self._grace.is_over():
                work.cancel()
                return False
            if self._silence.look(is_busy=self._is_busy()) > self._limit_s:
                self._die(f"the engine has shown no sign of life for {self._limit_s:g} s (--engine-timeout-s)")
        return True

    async def checked(self, check: Coroutine[Any, Any, SelfCheck]) -> SelfCheck:
        """Wait for an engine's self-check.

        Raises:
            EngineError: the engine died or is silent.
        """
        work = asyncio.create_task(check)
        while not (await asyncio.wait([work], timeout=POLL_S))[0]:
            if self._silence.look(is_busy=True) > self._limit_s:
                work.cancel()
                raise EngineError(f"the engine showed no sign of life in its self-check for {self._limit_s:g} s")
        return work.result()

    async def within(self, limit_s: float | None, answer: Coroutine[Any, Any, Generation]) -> Generation:
        """Wait for the answer of a row, at most `limit_s` seconds in a working engine.

        Raises:
            OutOfTime: the limit passed; the request is cancelled.
        """
        return await within(limit_s, answer, self._signs_of_life)


class SilenceClock:
    """Measures how long an engine with rows has been silent, in seconds.

    A gap between two observations counts a few seconds at most: while this process is suspended or overloaded, it
    cannot see the progress of the engine.

    Args:
        signs_of_life: a number that grows with the engine's work.
        monotonic: the clock, in seconds.
    """

    def __init__(self, signs_of_life: Callable[[], int], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._signs_of_life = signs_of_life
        self._monotonic = monotonic
        self._signs = signs_of_life()
        self._looked_at = monotonic()
        self._silent_s = 0.0

    def look(self, *, is_busy: bool) -> float:
        """Return the seconds of silence; 0 if the engine has no rows."""
        signs, now = self._signs_of_life(), self._monotonic()
        passed_s = min(now - self._looked_at, _LONGEST_LOOK_S)
        self._silent_s = self._silent_s + passed_s if is_busy and signs == self._signs else 0.0
        self._signs, self._looked_at = signs, now
        return self._silent_s


class LoopWatch:
    """A thread that ends this process when its event loop is blocked too long.

    It pings the loop regularly, and ends with the loop. It is started from the loop, so that loading an engine before
    does not count.

    Args:
        limit_s: of blocking; at least ten seconds.
        die: ends the process as for a silent engine. It has limited time, because it may wait for a lock of the loop.
        leave: ends the process immediately.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limit_s: float,
        die: Callable[[str], object],
        leave: Callable[[], object],
    ) -> None:
        self._loop, self._die, self._leave = loop, die, leave
        self._limit_s = max(limit_s, _MIN_BLOCKED_S)
        self._num_answers = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        clock = SilenceClock(lambda: self._num_answers)
        while self._ask():
            time.sleep(POLL_S)
            if clock.look(is_busy=True) > self._limit_s:
                self._end()
                return

    def _ask(self) -> bool:
        """Ping the loop; return False if it is closed."""
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed
            return False
        return self._loop.is_running()

    def _answer(self) -> None:
        self._num_answers += 1

    def _end(self) -> None:
        faulthandler.dump_traceback(file=_STDERR)  # the stack of the blocked loop
        late = threading.Timer(_FINAL_WRITES_S, self._leave)
        late.daemon = True
        late.start()
        try:
            self._die(f"the event loop was blocked for {self._limit_s:g} s (--engine-timeout-s)")
        finally:
            late.cancel()
            self._leave()


async def within(
    limit_s: float | None, answer: Coroutine[Any, Any, Generation], signs_of_life: Callable[[], int]
) -> Generation:
    """Wait for the answer of a row, at most `limit_s` seconds in a working engine.

    An engine that is silent when the limit passes may hang, which is not caused by the row, or be in a long step. So
    the row is out of time only at the next sign of life. A hanging engine is detected by its silence.

    Raises:
        OutOfTime: the limit passed; the request is cancelled.
    """
    if limit_s is None:
        return await answer
    row = asyncio.create_task(answer)
    try:
        done, _ = await asyncio.wait([row], timeout=limit_s)
        signs = signs_of_life()
        while not done:
            done, _ = await asyncio.wait([row], timeout=min(POLL_S, limit_s / _LOOKS_PER_LIMIT))
            if not done and signs_of_life() > signs:
                raise OutOfTime
        return row.result()
    finally:
        row.cancel()
