import asyncio

import pytest

from peagle.engine.interface import FAILED, Generation, RequestFailed, RequestRefused
from peagle.errors import EngineError
from peagle.runs.meter import BilledMeter
from pipelines.online.batches import lent
from pipelines.online.batches.lent import EndpointLender, LentEngine
from pipelines.online.wire import BorrowedReply, Context

LENDER = EndpointLender(
    deployment="d", application="a", context=Context(request_id="batch_1", key="alice", account="alice 1"),
    cache_salt="salt", num_slots=8,
)  # fmt: skip
SAMPLING = {"temperature": 1.0, "max_tokens": 5}
ANSWER = Generation(
    text="t", finish_reason="stop", num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=5, speculation=None,
    ttft_s=None, latency_s=None,
)  # fmt: skip
FULL, TAKEN = BorrowedReply(state="full"), BorrowedReply(state="taken")
DONE = BorrowedReply(state="done", generation=ANSWER, engine_s=2.0)
RETURNED = BorrowedReply(state="returned", engine_s=0.5)


class ActorDiedError(Exception):
    """A fake of Ray's exception, which is recognised by its name."""


class BackPressureError(Exception):
    """A fake of Ray Serve's exception, which is recognised by its name."""


class FakeEndpoint:
    """An endpoint with scripted replies to each call. An exception is raised; None blocks forever."""

    def __init__(self, *replies_by_call):
        self._replies_by_call, self.requests, self.num_cancelled = list(replies_by_call), [], 0

    def __call__(self, row):
        self.requests.append(row)
        return _Call(self, self._replies_by_call.pop(0))


class _Call:
    def __init__(self, endpoint, replies):
        self._endpoint, self._replies = endpoint, replies

    async def __aiter__(self):
        for reply in self._replies:
            if isinstance(reply, Exception):
                raise reply
            if reply is None:
                await asyncio.Event().wait()
            yield reply

    def cancel(self):
        self._endpoint.num_cancelled += 1


@pytest.fixture(autouse=True)
def no_retry_delay(monkeypatch):
    monkeypatch.setattr(lent, "_RETRY_S", 0.0)


def engine_of(endpoint):
    meter = BilledMeter()
    meter.start(0)
    return LentEngine(LENDER, endpoint, meter), meter


def generate(endpoint):
    engine, meter = engine_of(endpoint)
    return asyncio.run(engine.generate("7", [1, 2], SAMPLING)), meter.snapshot().busy_s


def test_row_is_retried_until_an_engine_finishes_it():
    endpoint = FakeEndpoint([FULL], [BackPressureError()], [TAKEN, RETURNED], [ActorDiedError()], [TAKEN, DONE])
    assert generate(endpoint) == (ANSWER, 2.5)
    assert [row.context.request_id for row in endpoint.requests] == [
        f"batch_1-7-{attempt}" for attempt in (1, 1, 1, 2, 2)
    ]
    assert {
        (row.context.key, row.context.account, row.cache_salt, *row.prompt_token_ids) for row in endpoint.requests
    } == {("alice", "alice 1", "salt", 1, 2)}
    assert endpoint.requests[0].sampling == SAMPLING


@pytest.mark.parametrize(
    ("reply", "error_type"),
    [
        (BorrowedReply(state="refused", reason="refused", message="too long"), RequestRefused),
        (BorrowedReply(state="refused", reason=FAILED, message="a fault"), RequestFailed),
        (ValueError("a bug"), RequestFailed),
        (ActorDiedError(), EngineError),
        (EngineError("dead"), EngineError),
    ],
)
def test_lent_engine_raises_the_same_errors_as_an_engine(reply, error_type):
    with pytest.raises(error_type) as error:
        generate(FakeEndpoint([TAKEN, reply]))
    assert type(error.value) is error_type


def test_only_one_row_at_a_time_waits_for_a_slot():
    endpoint = FakeEndpoint([FULL], [FULL], [TAKEN, TAKEN, DONE], [TAKEN, DONE])
    engine, _ = engine_of(endpoint)

    async def both():
        return await asyncio.gather(engine.generate("1", [1], SAMPLING), engine.generate("2", [2], SAMPLING))

    assert asyncio.run(both()) == [ANSWER, ANSWER]
    assert [row.prompt_token_ids for row in endpoint.requests] == [[1], [1], [1], [2]]
    assert engine.signs_of_life() == 7  # one per reply


@pytest.mark.parametrize("replies", [[None], [TAKEN, None]])
def test_cancelling_a_row_cancels_its_request(replies):
    endpoint = FakeEndpoint(replies)
    engine, _ = engine_of(endpoint)

    async def cancel():
        async with asyncio.timeout(0.05):
            await engine.generate("1", [1], SAMPLING)

    with pytest.raises(TimeoutError):
        asyncio.run(cancel())
    assert endpoint.num_cancelled == 1
