import asyncio

import pytest

from pipelines.batch.life import OutOfTime, SilenceClock, within


class Watched:
    def __init__(self):
        self.signs = self.now = 0
        self.clock = SilenceClock(lambda: self.signs, monotonic=lambda: self.now)

    def look(self, after_s, *, is_busy=True):
        self.now += after_s
        return self.clock.look(is_busy=is_busy)


def test_silence_is_counted_until_the_next_sign_of_life():
    watched = Watched()
    assert [watched.look(1) for _ in range(3)] == [1, 2, 3]
    watched.signs += 1
    assert [watched.look(1) for _ in range(2)] == [0, 1]


def test_an_engine_without_rows_has_nothing_to_say():
    watched = Watched()
    watched.look(4)
    assert watched.look(1, is_busy=False) == 0
    assert watched.look(1) == 1


def test_time_in_which_nobody_looked_is_no_silence():
    watched = Watched()
    watched.look(1)
    assert watched.look(3600) == 6


def in_time(answer_s, silent_s, limit_s=0.05):
    """What comes of a row that takes `answer_s` in an engine that is silent for `silent_s`."""

    async def scene():
        loop = asyncio.get_running_loop()
        start, cancelled = loop.time(), []

        async def answer():
            try:
                await asyncio.sleep(answer_s)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return "answer"

        def signs():
            return int(max(0.0, loop.time() - start - silent_s) * 1000)

        try:
            return await within(limit_s, answer(), signs)
        except OutOfTime:
            await asyncio.sleep(0)
            return cancelled

    return asyncio.run(asyncio.wait_for(scene(), 5))


def test_a_row_is_out_of_time_once_the_engine_has_worked_since():
    assert in_time(answer_s=0.01, silent_s=0) == "answer"
    assert in_time(answer_s=3, silent_s=0) == [True]
    assert in_time(answer_s=3, silent_s=0.3) == [True]


def test_a_row_gets_little_more_than_its_limit_from_an_engine_that_works():
    assert in_time(answer_s=1.6, silent_s=0, limit_s=1) == [True]


def test_a_row_that_ends_with_the_step_that_was_longer_than_its_limit_is_done():
    assert in_time(answer_s=0.3, silent_s=5) == "answer"


def test_what_an_engine_raises_comes_through_with_a_limit_and_without():
    async def refuse():
        raise ValueError("no")

    for limit_s in (None, 5):
        with pytest.raises(ValueError, match="no"):
            asyncio.run(within(limit_s, refuse(), lambda: 0))
