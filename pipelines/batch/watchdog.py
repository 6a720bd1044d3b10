"""The watchdog of an engine: its silence, its loop, a stop's grace, time limits.

A step and what comes of any row are signs of life. It knows no engine: it asks for a number that grows with the signs.
What looks at an engine runs in the event loop of its actor; whether that loop lives, a thread sees.
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
"""How often somebody looks while rows are in the engine."""
_LONGEST_LOOK_S = 5.0
_LEAST_STANDSTILL_S = 10.0  # a loop that has much to do on a machine that has too answers late, however short the limit
_LAST_WORDS_S = 150.0  # a store that does not answer is asked again for two minutes
_STDERR = 2
_LOOKS_PER_LIMIT = 20  # a row that is out of time is found out before it has had much more


class OutOfTime(Exception):  # noqa: N818 - the row's fault, not an error of ours
    """A row was not finished within its limit, by an engine that worked."""


class Watchdog:
    """Watches an engine for the actor that has it.

    Args:
        signs_of_life: a number that grows with the engine's work.
        limit_s: of silence, while rows are in the engine, and of standing still of the event loop.
        grace: a stop's.
        is_busy: whether rows are in the engine.
        die: ends this process, with a note of its rows and a reason.
        leave: ends it at once.
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
        """Watch the event loop that this is called in, from the first time on."""
        if self._loop_watch is None:
            loop = asyncio.get_running_loop()
            self._loop_watch = LoopWatch(loop, limit_s=self._limit_s, die=self._die, leave=self._leave)

    def is_stopping(self) -> bool:
        """Whether the run is being stopped: nothing new is to be started."""
        return self._grace.is_asked()

    async def finished(self, work: "asyncio.Task[Any]") -> bool:
        """Wait for a unit's rows; False, rows cancelled, when a stop's grace is over.

        Who waits also watches: an engine that is silent for too long ends here. `LoopWatch` sees whether anybody waits.
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
        """A row's answer, given up after `limit_s` seconds in a working engine.

        Raises:
            OutOfTime: the row is given up; its request is cancelled.
        """
        return await within(limit_s, answer, self._signs_of_life)


class SilenceClock:
    """How long an engine with rows in it has shown no sign of life, in seconds.

    Only time in which somebody looked counts, a few seconds a look: what the engine did while this process was stopped,
    or had too much else to do, it has had no chance to tell.

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
        """Seconds of silence up to now.

        0 where no row is in the engine, which then has nothing to say.
        """
        signs, now = self._signs_of_life(), self._monotonic()
        passed_s = min(now - self._looked_at, _LONGEST_LOOK_S)
        self._silent_s = self._silent_s + passed_s if is_busy and signs == self._signs else 0.0
        self._signs, self._looked_at = signs, now
        return self._silent_s


class LoopWatch:
    """A thread that ends this process when its event loop stands still too long.

    It asks the loop for a sign at each look, and goes when the loop has ended. Begun from within the loop, so that
    nothing counts that takes long before there is one, such as an engine that loads.

    Args:
        limit_s: of standing still; ten seconds at least.
        die: ends the process, as for an engine that is silent. It has a moment: what the loop holds on to may be what
            it waits for.
        leave: ends the process at once.
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
        self._limit_s = max(limit_s, _LEAST_STANDSTILL_S)
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
        """Have the loop answer; False where there is none any more that could."""
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it is closed
            return False
        return self._loop.is_running()

    def _answer(self) -> None:
        self._num_answers += 1

    def _end(self) -> None:
        faulthandler.dump_traceback(file=_STDERR)  # where it stands
        late = threading.Timer(_LAST_WORDS_S, self._leave)
        late.daemon = True
        late.start()
        try:
            self._die(f"the event loop has stood still for {self._limit_s:g} s (--engine-timeout-s)")
        finally:
            late.cancel()
            self._leave()


async def within(
    limit_s: float | None, answer: Coroutine[Any, Any, Generation], signs_of_life: Callable[[], int]
) -> Generation:
    """A row's answer, given up after `limit_s` seconds in a working engine.

    The engine must have worked since.

    An engine that is silent at that moment may hang, which is no fault of the row's; or be in a step that is longer
    than the limit. So a row is only out of time at the next sign of life; an engine that never gives one is judged by
    its silence.

    Raises:
        OutOfTime: the row is given up; its request is cancelled.
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
