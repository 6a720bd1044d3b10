import asyncio
import threading
import time

import pytest

from pipelines.online.heavy import AT_ONCE, HeavyWork

LARGE = 2**20


class Busy:
    """Work that goes on until it is let go, and how much of it went on at once, in all and of each key."""

    def __init__(self):
        self._lock, self.go = threading.Lock(), threading.Event()
        self.now, self.most, self.done = {}, 0, []

    def work(self, key):
        with self._lock:
            self.now[key] = self.now.get(key, 0) + 1
            assert self.now[key] == 1
            self.most = max(self.most, sum(self.now.values()))
        self.go.wait(10)
        with self._lock:
            self.now[key] -= 1
            self.done.append(key)
        return key


def test_a_few_go_on_at_once_one_of_each_key():
    async def run():
        heavy, busy = HeavyWork(), Busy()
        asked = [asyncio.create_task(heavy.run(key, LARGE, busy.work, key)) for key in "aaabc"]
        await asyncio.sleep(0.1)
        assert busy.most == AT_ONCE
        busy.go.set()
        assert await asyncio.gather(*asked) == list("aaabc")
        assert busy.most == AT_ONCE
        assert heavy._turns == {}

    asyncio.run(run())


def test_who_leaves_gives_no_second_turn_to_its_key_before_its_work_has_ended():
    async def run():
        heavy, busy = HeavyWork(), Busy()
        left = [asyncio.create_task(heavy.run("a", LARGE, busy.work, "a")) for _ in range(5)]
        await asyncio.sleep(0.1)
        for task in left:
            task.cancel()
        other = asyncio.create_task(heavy.run("a", LARGE, busy.work, "a"))
        await asyncio.sleep(0.1)
        assert busy.now == {"a": 1}
        busy.go.set()
        assert await other == "a"
        assert busy.done == ["a", "a"]
        assert all(task.cancelled() for task in left)

    asyncio.run(run())


def test_what_is_short_is_done_at_once_and_what_fails_fails():
    async def run():
        heavy = HeavyWork()
        assert await heavy.run("a", 100, threading.get_ident) == threading.get_ident()
        assert await heavy.run("a", LARGE, threading.get_ident) != threading.get_ident()
        for size in (100, LARGE):
            with pytest.raises(ValueError, match="invalid literal"):
                await heavy.run("a", size, int, "x")
        assert heavy._turns == {}

    asyncio.run(run())


def test_the_loop_goes_on_beside_short_steps():
    def steps():
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            sum(range(1000))

    async def run():
        task, late_s = asyncio.create_task(HeavyWork().run("a", LARGE, steps)), []
        while not task.done():
            due = time.monotonic() + 0.001
            await asyncio.sleep(0.001)
            late_s.append(time.monotonic() - due)
        assert sorted(late_s)[len(late_s) // 2] < 0.05

    asyncio.run(run())
