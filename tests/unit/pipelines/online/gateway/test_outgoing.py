import asyncio

import pytest

from pipelines.online.errors import ApiError
from pipelines.online.gateway.outgoing import RefusalDelay, RefusalLog, describe_load

CARD = {"max_requests_per_replica": 9, "max_replicas": 4}


def replicas(running, starting=0):
    return {"num_running_replicas": running, "num_starting_replicas": starting, "num_stopping_replicas": 0}


@pytest.mark.parametrize(("running", "in_flight", "waiting"), [(2, 25, 7), (2, 18, 0), (0, 3, 3), (1, 0, 0)])
def test_requests_beyond_the_engines_capacity_wait(running, in_flight, waiting):
    load = describe_load(CARD, replicas(running, starting=1), in_flight)
    assert load["num_requests_waiting"] == waiting
    assert load["num_requests_under_way"] == in_flight
    assert (load["num_running_replicas"], load["num_starting_replicas"], load["max_replicas"]) == (running, 1, 4)


class FakeClock:
    """A clock that records each sleep and advances by its duration. With `sleeps_end=False`, sleeps never end."""

    def __init__(self, *, sleeps_end=True):
        self.now, self.sleeps_s, self._sleeps_end = 100.0, [], sleeps_end

    async def sleep(self, seconds):
        self.sleeps_s.append(seconds)
        if not self._sleeps_end:
            await asyncio.Event().wait()
        self.now += seconds

    def refusal_delay(self, per_s=4):
        return RefusalDelay(per_s, monotonic=lambda: self.now, sleep=self.sleep)


async def refuse(delay, account, times):
    for _ in range(times):
        await delay.wait(account)


async def test_consecutive_refusals_are_delayed_per_key():
    clock = FakeClock()
    delay = clock.refusal_delay()
    await refuse(delay, "alice", 21)
    await refuse(delay, "bob", 5)
    assert clock.sleeps_s == []
    await refuse(delay, "alice", 10)
    assert clock.sleeps_s == pytest.approx([0.25] * 10)
    clock.sleeps_s.clear()
    clock.now += 5.25
    await refuse(delay, "alice", 21)
    assert clock.sleeps_s == []


async def test_delay_and_number_of_delayed_refusals_are_limited():
    clock = FakeClock(sleeps_end=False)
    delay = clock.refusal_delay()
    tasks = [asyncio.create_task(delay.wait("alice")) for _ in range(500)]
    await asyncio.wait(tasks, timeout=0.2)
    delayed = [task for task in tasks if not task.done()]
    for task in delayed:
        task.cancel()
    await asyncio.wait(delayed)
    assert len(delayed) == 64
    assert max(clock.sleeps_s) == pytest.approx(2.0)
    clock.now += 60
    await refuse(delay, "alice", 21)  # not delayed, because cancelled refusals no longer count
    assert len(clock.sleeps_s) == 64


def test_refusals_are_logged_once_a_second_per_address(clock, caplog):
    log = RefusalLog(monotonic=clock)

    def refuse(address, path="/v1/models"):
        scope = {"client": (address, 1), "method": "GET", "path": path}
        log.log(scope, ApiError(401, "no", code="invalid_api_key"))

    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"):
        refuse(address)
    clock.now += 1
    refuse("10.0.0.1", "/" + "x" * 10_000)
    for number in range(2000):
        refuse(f"10.1.{number}.1")
    first, second, third, *_ = caplog.messages
    assert first == "refused GET '/v1/models' from 10.0.0.1: 401 invalid_api_key"
    assert second == "refused GET '/v1/models' from 10.0.0.2: 401 invalid_api_key"
    assert third.endswith("from 10.0.0.1: 401 invalid_api_key; 2 more since the last line")
    assert max(map(len, caplog.messages)) < 400
    assert len(log._logged) <= 1024
