import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import RequestReader
from peagle.engine.interface import Generation, RequestRefused
from peagle.errors import EngineError
from pipelines.online.replica.lending import IdleSlots, lend
from pipelines.online.wire import BorrowedRequest, Context

SLOTS = 8
SAMPLING = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}


def make_row(name="r", **sampling):
    return BorrowedRequest(
        context=Context(request_id=name, key="alice", account="alice 1", tags='{"team": "search"}'), cache_salt=None,
        prompt_token_ids=[1, 2, 3], sampling=SAMPLING | sampling,
    )  # fmt: skip


class EngineWithLentSlots:
    """An engine with lent slots. It answers a row once a test sets the row's result in `results`."""

    def __init__(self, account, slots=None):
        self.slots, self._account = slots or IdleSlots(SLOTS, target=5.6), account  # the target for eight slots
        self.results, self.replies, self._tasks = {}, {}, []

    async def _generate(self, request):
        self.results[request.context.request_id] = result = asyncio.get_running_loop().create_future()
        return await result

    async def send_row(self, name, **sampling):
        """Send a row, and record the replies in `replies`."""
        replies = self.replies[name] = []

        async def listen():
            async for answer in lend(
                self.slots, self._account, make_row(name, **sampling), self._generate, max_slots=SLOTS
            ):
                replies.append(answer)

        self._tasks.append(asyncio.create_task(listen()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # now the row's task is waiting
        return self._tasks[-1]

    def states(self, name):
        return [answer.state for answer in self.replies[name]]

    async def wait(self):
        return await asyncio.gather(*self._tasks, return_exceptions=True)


def generation(num_output_tokens=7):
    return Generation(
        text="t", finish_reason="stop", num_prompt_tokens=3, num_cached_tokens=2, num_output_tokens=num_output_tokens,
        speculation=None, ttft_s=0.1, latency_s=0.2,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def interactive_request(slots, num_choices=1):
    """Run an interactive request until the `with` block ends."""
    may_end = asyncio.Event()

    async def answer():
        yield "started"
        await may_end.wait()

    parts = slots.track_interactive(answer(), num_choices)
    assert await anext(parts) == "started"
    yield
    may_end.set()
    assert [part async for part in parts] == []


def records(tmp_path):
    return RequestReader(tmp_path / "ledger").new()


async def test_rows_and_requests_stay_below_the_scaling_target(engine_account):
    engine = EngineWithLentSlots(engine_account)
    async with interactive_request(engine.slots), interactive_request(engine.slots):
        for number in range(5):
            await engine.send_row(f"r{number}")
    for result in engine.results.values():
        result.set_result(generation())
    await engine.wait()
    assert [engine.states(f"r{number}") for number in range(5)] == [["taken", "done"]] * 3 + [["full"]] * 2


async def test_row_with_many_choices_needs_an_idle_engine(engine_account):
    engine = EngineWithLentSlots(engine_account)
    await engine.send_row("many", n=32)
    await engine.send_row("one")
    engine.results["many"].set_result(generation())
    await engine.wait()
    assert (engine.states("many"), engine.states("one")) == (["taken", "done"], ["full"])


async def test_single_slot_is_returned_to_interactive_requests(engine_account):
    engine = EngineWithLentSlots(engine_account, IdleSlots(1, target=0.38))  # the target for one slot
    await engine.send_row("r")
    async with interactive_request(engine.slots):
        await engine.wait()
        await engine.send_row("late")
    assert (engine.states("r"), engine.states("late")) == (["taken", "returned"], ["full"])


async def test_newest_rows_are_returned_for_interactive_requests(engine_account, clock, tmp_path):
    engine_account.ready()
    engine = EngineWithLentSlots(engine_account)
    tasks = [await engine.send_row(f"r{number}") for number in range(5)]
    clock.now += 10
    async with interactive_request(engine.slots, num_choices=4):
        await asyncio.gather(*tasks[3:])
        states = [engine.states(f"r{number}") for number in range(5)]
        for number in range(3):
            engine.results[f"r{number}"].set_result(generation())
        await engine.wait()
    assert states == [["taken"]] * 3 + [["taken", "returned"]] * 2
    assert engine.replies["r4"][-1].engine_s == pytest.approx(2.0), "five rows share ten seconds"
    assert sorted((record.request_id, record.outcome) for record in records(tmp_path)) == [
        ("r0", "ok"), ("r1", "ok"), ("r2", "ok"), ("r3", "cut"), ("r4", "cut"),
    ]  # fmt: skip


async def test_row_is_billed_to_its_key_without_metrics(tmp_path, clock, engine_account):
    measured_requests = []
    listener = SimpleNamespace(record_request=measured_requests.append, record_heartbeat=lambda session: None)
    engine_account._listener = listener
    engine_account.ready()
    engine = EngineWithLentSlots(engine_account)
    await engine.send_row("r")
    clock.now += 4
    engine.results["r"].set_result(generation())
    await engine.wait()
    answer = engine.replies["r"][-1]
    assert (answer.generation, answer.engine_s) == (generation(), pytest.approx(4.0))
    (record,) = records(tmp_path)
    assert (record.key, record.account, record.tags) == ("alice", "alice 1", '{"team": "search"}')
    assert (record.usage.num_prompt_tokens, record.usage.num_cached_tokens, record.usage.num_output_tokens) == (3, 2, 7)
    assert (record.usd, record.ttft_s) == (pytest.approx(4 * 2 * 0.01), None)
    assert measured_requests == []


async def test_refused_row_is_billed(engine_account, clock, tmp_path):
    engine_account.ready()
    engine = EngineWithLentSlots(engine_account)
    await engine.send_row("r")
    clock.now += 4
    engine.results["r"].set_exception(RequestRefused("too long"))
    await engine.wait()
    answer = engine.replies["r"][-1]
    assert (answer.state, answer.reason, answer.message) == ("refused", "refused", "too long")
    assert answer.engine_s == pytest.approx(4.0)
    (record,) = records(tmp_path)
    assert (record.outcome, record.usd) == ("failed", pytest.approx(4 * 2 * 0.01))


async def test_crashed_engine_bills_nothing(engine_account, tmp_path):
    engine = EngineWithLentSlots(engine_account)
    await engine.send_row("r")
    engine.results["r"].set_exception(EngineError("dead"))
    (error,) = await engine.wait()
    assert isinstance(error, EngineError)
    assert records(tmp_path) == []


async def test_cancelled_row_frees_its_slot(engine_account, tmp_path):
    engine = EngineWithLentSlots(engine_account, IdleSlots(2, target=1.0))
    (await engine.send_row("r")).cancel()
    await engine.wait()
    cancelled = engine.results["r"].cancelled()
    await engine.send_row("next")
    engine.results["next"].set_result(generation())
    await engine.wait()
    assert (cancelled, engine.states("next")) == (True, ["taken", "done"])
    assert [(record.request_id, record.outcome) for record in records(tmp_path)] == [("r", "cut"), ("next", "ok")]
