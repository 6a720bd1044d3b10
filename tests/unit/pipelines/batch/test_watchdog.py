import asyncio
import threading
import time

import pytest

from peagle.errors import EngineError
from peagle.runs.stopping import GraceClock
from pipelines.batch import watchdog
from pipelines.batch.watchdog import LoopWatch, OutOfTime, SilenceClock, Watchdog, wait_for_answer


class SimulatedEngine:
    def __init__(self):
        self.signs_of_life = self.now = 0
        self.clock = SilenceClock(lambda: self.signs_of_life, monotonic=lambda: self.now)

    def observe_after(self, elapsed_s, *, is_busy=True):
        self.now += elapsed_s
        return self.clock.observe(is_busy=is_busy)


def test_silence_ends_with_a_sign_of_life():
    engine = SimulatedEngine()
    assert [engine.observe_after(1) for _ in range(3)] == [1, 2, 3]
    engine.signs_of_life += 1
    assert [engine.observe_after(1) for _ in range(2)] == [0, 1]


def test_idle_engine_is_not_silent():
    engine = SimulatedEngine()
    engine.observe_after(4)
    assert engine.observe_after(1, is_busy=False) == 0
    assert engine.observe_after(1) == 1


def test_long_gap_between_observations_counts_as_five_seconds():
    engine = SimulatedEngine()
    engine.observe_after(1)
    assert engine.observe_after(3600) == 6


def row_outcome(answer_s, silent_s, limit_s=0.05):
    """Generate a row for `answer_s` in an engine that is silent for `silent_s`.

    Returns:
        The answer; or, after a timeout, [True] if the row was cancelled.
    """

    async def main():
        loop = asyncio.get_running_loop()
        started_at, cancelled = loop.time(), []

        async def answer():
            try:
                await asyncio.sleep(answer_s)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return "answer"

        def signs_of_life():
            return int(max(0.0, loop.time() - started_at - silent_s) * 1000)

        try:
            return await wait_for_answer(limit_s, answer(), signs_of_life)
        except OutOfTime:
            await asyncio.sleep(0)
            return cancelled

    return asyncio.run(asyncio.wait_for(main(), 5))


def test_row_times_out_at_the_first_sign_of_life_after_its_limit():
    assert row_outcome(answer_s=0.01, silent_s=0) == "answer"
    assert row_outcome(answer_s=3, silent_s=0) == [True]
    assert row_outcome(answer_s=3, silent_s=0.3) == [True]


def test_long_time_limit_is_checked_frequently():
    assert row_outcome(answer_s=1.6, silent_s=0, limit_s=1) == [True]


def test_row_that_ends_before_the_next_sign_of_life_is_not_cancelled():
    assert row_outcome(answer_s=0.3, silent_s=5) == "answer"


def test_engine_errors_pass_through():
    async def refuse():
        raise ValueError("no")

    for limit_s in (None, 5):
        with pytest.raises(ValueError, match="no"):
            asyncio.run(wait_for_answer(limit_s, refuse(), lambda: 0))


@pytest.fixture
def watched_loop(monkeypatch):
    """Return a function that runs a coroutine in a watched event loop, and returns "left" for each call of `leave`.

    `leave` is called only if the loop was blocked. A poll counts for at most 0.03 s, so that a busy machine does not
    look like a blocked loop.
    """
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "_MAX_GAP_S", 0.03)
    monkeypatch.setattr(watchdog, "_MIN_BLOCKED_S", 0.0)

    def run_watched(main, die, *, limit_s=0.3):
        leave_calls, earlier_threads = [], set(threading.enumerate())

        async def run():
            LoopWatch(asyncio.get_running_loop(), limit_s=limit_s, die=die, leave=lambda: leave_calls.append("left"))
            await main(leave_calls)

        asyncio.run(run())
        for thread in set(threading.enumerate()) - earlier_threads:
            thread.join(5)
        return leave_calls

    return run_watched


def test_responsive_event_loop_is_not_killed(watched_loop):
    async def responds(_):
        for _ in range(50):
            await asyncio.sleep(0.02)

    assert watched_loop(responds, pytest.fail) == []


def test_blocked_event_loop_ends_the_process_with_a_traceback(watched_loop, capfd):
    ended, reasons = threading.Event(), []

    def die(reason):
        reasons.append(reason)
        ended.set()

    async def blocks_the_loop(_):
        assert ended.wait(20)

    assert watched_loop(blocks_the_loop, die) == ["left"]
    assert reasons == ["the event loop was blocked for 0.3 s (--engine-timeout-s)"]
    assert "in blocks_the_loop" in capfd.readouterr().err


def test_blocked_process_ends_even_if_die_hangs(watched_loop, monkeypatch):
    monkeypatch.setattr(watchdog, "_FINAL_WRITES_S", 0.05)
    released = threading.Event()

    async def blocks_until_left(leave_calls):
        deadline = time.monotonic() + 20
        while not leave_calls and time.monotonic() < deadline:
            time.sleep(0.01)
        released.set()

    # `leave` is called while `die` hangs, and again after `die` returns.
    assert watched_loop(blocks_until_left, lambda reason: released.wait(20)) == ["left", "left"]


def test_loop_limit_is_at_least_ten_seconds(monkeypatch, watched_loop):
    monkeypatch.setattr(watchdog, "_MIN_BLOCKED_S", 10.0)

    async def blocks_for_1_s(_):
        threading.Event().wait(1)

    assert watched_loop(blocks_for_1_s, pytest.fail, limit_s=0.1) == []


class ProcessEnded(Exception):  # noqa: N818
    """Raised instead of ending the process."""


def die(reason):
    raise ProcessEnded(reason)


@pytest.fixture
def make_watchdog(monkeypatch):
    """Return a function that creates a watchdog. `grace_s` is the time left to stop."""
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)

    def make(*, is_responsive=True, is_busy=True, grace_s=None):
        return Watchdog(
            time.monotonic_ns if is_responsive else lambda: 0,
            limit_s=0.1,
            grace=GraceClock(lambda: grace_s),
            is_busy=lambda: is_busy,
            die=die,
            leave=pytest.fail,
        )

    return make


async def finish_after(delay_s, cancelled=None):
    try:
        await asyncio.sleep(delay_s)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.append(True)
        raise
    return "done"


def wait_for_work(unit_watchdog, delay_s):
    """Return whether work of `delay_s` finished, and whether it was cancelled."""

    async def main():
        cancelled = []
        work = asyncio.create_task(finish_after(delay_s, cancelled))
        is_finished = await unit_watchdog.wait_for_unit(work)
        await asyncio.sleep(0)
        return is_finished, bool(cancelled)

    return asyncio.run(main())


def test_unit_of_a_responsive_or_idle_engine_is_awaited(make_watchdog):
    assert wait_for_work(make_watchdog(), 0.3) == (True, False)
    assert wait_for_work(make_watchdog(is_responsive=False, is_busy=False), 0.3) == (True, False)


def test_running_unit_gets_the_grace_period(make_watchdog):
    unit_watchdog = make_watchdog(grace_s=0.1)
    assert unit_watchdog.is_stopping()
    assert wait_for_work(unit_watchdog, 0.02) == (True, False)
    assert wait_for_work(unit_watchdog, 30) == (False, True)
    assert not make_watchdog().is_stopping()


def test_silent_engine_ends_its_process(make_watchdog):
    with pytest.raises(ProcessEnded, match=r"no sign of life for 0\.1 s \(--engine-timeout-s\)"):
        wait_for_work(make_watchdog(is_responsive=False), 30)


def test_silent_self_check_is_an_error(make_watchdog):
    assert asyncio.run(make_watchdog().wait_for_self_check(finish_after(0.3))) == "done"
    with pytest.raises(EngineError, match=r"no sign of life in its self-check for 0\.1 s"):
        asyncio.run(make_watchdog(is_responsive=False).wait_for_self_check(finish_after(30)))
