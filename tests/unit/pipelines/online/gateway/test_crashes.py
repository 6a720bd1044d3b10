import asyncio
import logging

import pytest

from pipelines.online.errors import ApiError
from pipelines.online.gateway import crashes as module
from pipelines.online.gateway.crashes import EngineCrashes


@pytest.fixture
def crashes(clock, monkeypatch):
    monkeypatch.setattr(module, "CRASH_SETTLE_S", 0.05)
    reported = []
    engine_crashes = EngineCrashes(on_crash=reported.append, monotonic=clock)
    engine_crashes.reported = reported
    return engine_crashes


NOT_RETRIED = (503, "engine_crashed", {"x-should-retry": "false"})


def start_attempt(crashes, key, model="m"):
    return crashes.start(request_id=f"request of {key}", key=key, account=key, model=model)


async def crash_and_retry(crashes, *attempts):
    """Crash the engine of these attempts. Return the accounts that are retried, in order, and the refusals."""
    retried_accounts, refusals = [], []

    async def retry(attempt):
        try:
            async with crashes.retry(attempt):
                retried_accounts.append(attempt.account)
        except ApiError as error:
            refusals.append((error.status, error.code, error.headers()))

    await asyncio.gather(*map(retry, attempts))
    return retried_accounts, refusals


def test_only_older_requests_are_retried(crashes, clock, caplog):
    old, older = start_attempt(crashes, "old"), start_attempt(crashes, "older")
    clock.now += 1
    neighbour = start_attempt(crashes, "neighbour")
    clock.now += 0.02  # less than _SAME_STEP_S, so both newest requests are suspects
    newest = start_attempt(crashes, "newest")
    with caplog.at_level(logging.ERROR):
        retried_accounts, refusals = asyncio.run(crash_and_retry(crashes, newest, old, neighbour, older))
    assert retried_accounts == ["old", "older"]
    assert refusals == [NOT_RETRIED, (503, "overloaded", {"retry-after": "5"})]
    assert crashes.reported == [newest]
    assert "request of newest" in caplog.text


def test_only_request_of_a_crashed_engine_is_not_retried(crashes):
    assert asyncio.run(crash_and_retry(crashes, start_attempt(crashes, "a"))) == ([], [NOT_RETRIED])


def test_crashes_of_two_models_are_separate(crashes, clock):
    first = start_attempt(crashes, "first", "m")
    clock.now += 1
    second = start_attempt(crashes, "second", "other")
    assert asyncio.run(crash_and_retry(crashes, first, second)) == ([], [NOT_RETRIED] * 2)
    assert crashes.reported == [first, second]


async def test_request_in_two_crashes_is_not_retried_again(crashes, clock):
    poison = start_attempt(crashes, "poison")
    clock.now += 1
    bystander = start_attempt(crashes, "bystander")
    assert await crash_and_retry(crashes, poison, bystander) == (["poison"], [NOT_RETRIED])
    clock.now += 1
    newer = start_attempt(crashes, "newer")
    clock.now += 1
    with pytest.raises(ApiError, match="two engines crashed"):
        await asyncio.gather(crashes.report(poison), crashes.report(newer))
    assert newer.num_crashes == 1
    assert [request.account for request in crashes.reported] == ["bystander", "poison"]


@pytest.mark.parametrize(("probation_s", "is_sequential"), [(5.0, True), (0.001, False)])
async def test_suspects_are_retried_one_by_one(crashes, clock, monkeypatch, probation_s, is_sequential):
    """The next suspect starts once the current suspect has ended, or has run for `_PROBATION_S` without a crash."""
    monkeypatch.setattr(module, "_PROBATION_S", probation_s)
    running, peak = 0, 0

    async def retry(attempt):
        nonlocal running, peak
        async with crashes.retry(attempt):
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.02)
            running -= 1

    attempts = [start_attempt(crashes, f"k{number}") for number in range(4)]
    clock.now += 1
    attempts.append(start_attempt(crashes, "newest"))
    assert [type(result) for result in (await asyncio.gather(*map(retry, attempts), return_exceptions=True))] == [
        type(None)
    ] * 4 + [ApiError]
    assert (peak == 1) == is_sequential


def test_key_with_two_crashes_in_five_minutes_is_limited(crashes, clock):
    crashes.require_allowed("a")
    asyncio.run(crash_and_retry(crashes, start_attempt(crashes, "a")))
    crashes.require_allowed("a")
    assert crashes.notes() == ["engines crashed once in 5 minutes on requests of a"]
    clock.now += 100
    asyncio.run(crash_and_retry(crashes, start_attempt(crashes, "a")))
    crashes.require_allowed("b")
    with pytest.raises(ApiError) as error:
        crashes.require_allowed("a")
    assert (error.value.status, error.value.code, error.value.retry_after_s) == (429, "engine_crashes", 200)
    assert crashes.notes() == ["engines crashed 2 times in 5 minutes on requests of a; the key is limited for 200 s"]
    clock.now += 201
    crashes.require_allowed("a")
    clock.now += 300
    assert crashes.notes() == []
