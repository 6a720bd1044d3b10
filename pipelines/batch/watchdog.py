"""Detect an engine that hangs, rows over their time limit, and the end of a stop's grace period.

An engine hangs if its signs of life, a counter of steps and finished rows, do not change. The event loop of the actor
watches the engine, and a thread watches the event loop.
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
"""Six times vLLM's own time limit for a step of its workers. A step takes minutes if it compiles a kernel, or if a
large model runs on a few cores."""
POLL_S = 1.0
"""Interval of checks while rows are in the engine."""
_MAX_GAP_S = 5.0  # a longer gap between two observations counts as this much silence
_MIN_BLOCKED_S = 10.0  # even a working event loop may respond late on a busy machine
_FINAL_WRITES_S = 150.0  # requests to a store are retried for two minutes
_STDERR = 2  # file descriptor
_CHECKS_PER_LIMIT = 20  # so that a row's time limit is noticed at most 5 % late


class OutOfTime(Exception):  # noqa: N818 - caused by the row
    """A row exceeded its time limit in a working engine."""


class Watchdog:
    """The watchdog of an actor's engine.

    Args:
        signs_of_life: returns a number that grows with the engine's work.
        limit_s: how long the engine may be silent while it has rows, or the event loop may be blocked.
        grace: clock of the grace period after a stop.
        is_busy: returns whether rows are in the engine.
        die: records the rows in the engine and a reason, and ends this process.
        leave: ends this process immediately.
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
        """Start watching the event loop of the caller. Later calls have no effect."""
        if self._loop_watch is None:
            loop = asyncio.get_running_loop()
            self._loop_watch = LoopWatch(loop, limit_s=self._limit_s, die=self._die, leave=self._leave)

    def is_stopping(self) -> bool:
        """Return whether the run is being stopped, so that no more units are started."""
        return self._grace.is_stopping()

    async def wait_for_unit(self, work: "asyncio.Task[Any]") -> bool:
        """Wait for the rows of a unit. If the grace period of a stop ends first, cancel them and return False.

        If the engine is silent for too long, this process ends.
        """
        while not (await asyncio.wait([work], timeout=POLL_S))[0]:
            if self._grace.is_over():
                work.cancel()
                return False
            if self._silence.observe(is_busy=self._is_busy()) > self._limit_s:
                self._die(f"the engine has shown no sign of life for {self._limit_s:g} s (--engine-timeout-s)")
        return True

    async def wait_for_self_check(self, check: Coroutine[Any, Any, SelfCheck]) -> SelfCheck:
        """Wait for an engine's self-check.

        Raises:
            EngineError: the engine died or is silent.
        """
        work = asyncio.create_task(check)
        while not (await asyncio.wait([work], timeout=POLL_S))[0]:
            if self._silence.observe(is_busy=True) > self._limit_s:
                work.cancel()
                raise EngineError(f"the engine showed no sign of life in its self-check for {self._limit_s:g} s")
        return work.result()

    async def wait_for_answer(self, limit_s: float | None, answer: Coroutine[Any, Any, Generation]) -> Generation:
        """Wait for the answer of a row for at most `limit_s` seconds.

        Raises:
            OutOfTime: the limit passed while the engine worked; the request is cancelled.
        """
        return await wait_for_answer(limit_s, answer, self._signs_of_life)


class SilenceClock:
    """Measures how many seconds an engine with rows has been silent.

    A gap between two observations counts as at most a few seconds of silence: while this process is suspended or
    overloaded, it cannot see the progress of the engine.

    Args:
        signs_of_life: returns a number that grows with the engine's work.
        monotonic: the clock, in seconds.
    """

    def __init__(self, signs_of_life: Callable[[], int], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._signs_of_life = signs_of_life
        self._monotonic = monotonic
        self._last_signs = signs_of_life()
        self._observed_at = monotonic()
        self._silent_s = 0.0

    def observe(self, *, is_busy: bool) -> float:
        """Return the seconds of silence; 0 if the engine has no rows."""
        signs, now = self._signs_of_life(), self._monotonic()
        passed_s = min(now - self._observed_at, _MAX_GAP_S)
        self._silent_s = self._silent_s + passed_s if is_busy and signs == self._last_signs else 0.0
        self._last_signs, self._observed_at = signs, now
        return self._silent_s


class LoopWatch:
    """A thread that ends this process when its event loop is blocked too long.

    The thread pings the loop regularly, and ends with the loop. It is started from the running loop, so that the
    engine's loading time does not count.

    Args:
        limit_s: how long the loop may be blocked; at least ten seconds.
        die: records a reason and ends the process. `die` might hang, waiting for a lock that the loop holds.
        leave: ends the process immediately, even if `die` hangs.
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
        self._num_replies = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        clock = SilenceClock(lambda: self._num_replies)
        while self._ping():
            time.sleep(POLL_S)
            if clock.observe(is_busy=True) > self._limit_s:
                self._end()
                return

    def _ping(self) -> bool:
        """Ping the loop. Returns False if the loop is closed or stopped."""
        try:
            self._loop.call_soon_threadsafe(self._reply)
        except RuntimeError:  # the loop is closed
            return False
        return self._loop.is_running()

    def _reply(self) -> None:
        self._num_replies += 1

    def _end(self) -> None:
        faulthandler.dump_traceback(file=_STDERR)  # the stack of the blocked loop
        timer = threading.Timer(_FINAL_WRITES_S, self._leave)
        timer.daemon = True
        timer.start()
        try:
            self._die(f"the event loop was blocked for {self._limit_s:g} s (--engine-timeout-s)")
        finally:
            timer.cancel()
            self._leave()


async def wait_for_answer(
    limit_s: float | None, answer: Coroutine[Any, Any, Generation], signs_of_life: Callable[[], int]
) -> Generation:
    """Wait for the answer of a row for at most `limit_s` seconds.

    If the engine is silent when the limit passes, it might hang, which is not the fault of the row. So the row only
    fails at the engine's next sign of life. A hanging engine is detected by its silence.

    Raises:
        OutOfTime: the limit passed while the engine worked; the request is cancelled.
    """
    if limit_s is None:
        return await answer
    row_task = asyncio.create_task(answer)
    try:
        done, _ = await asyncio.wait([row_task], timeout=limit_s)
        signs = signs_of_life()
        while not done:
            done, _ = await asyncio.wait([row_task], timeout=min(POLL_S, limit_s / _CHECKS_PER_LIMIT))
            if not done and signs_of_life() > signs:
                raise OutOfTime
        return row_task.result()
    finally:
        row_task.cancel()
