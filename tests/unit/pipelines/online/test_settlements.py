import asyncio
import threading
from dataclasses import replace

import pytest

from peagle.economics.ledger import append_request, write_batch
from pipelines.online.answers import Tally
from pipelines.online.budgets import budgets_of
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord
from pipelines.online.settlements import Settlements

ALICE = KeyRecord(name="alice", sha256="0" * 64, output_tokens_per_min=100, budget_usd=1)


def used(account, request_id, tokens, busy_s, clock):
    request = account.begin(request_id, "alice")
    clock.now += busy_s
    request.tally = Tally(num_output_tokens=tokens)
    return request.finish("cut")


def test_hanging_up_gives_no_tokens_for_nothing(engine_account, clock, tmp_path):
    engine_account.ready()
    settlements = Settlements(tmp_path / "ledger", monotonic=clock)
    permit = settlements.limiter.admit(ALICE, 100)
    settlements.defer("r1", permit)
    asyncio.run(settlements.catch_up())
    with pytest.raises(ApiError):
        settlements.limiter.admit(ALICE, 50)
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 2, clock))
    asyncio.run(settlements.catch_up())
    settlements.limiter.admit(ALICE, 60)
    with pytest.raises(ApiError):
        settlements.limiter.admit(ALICE, 1)


def test_a_record_that_is_read_before_the_ingress_gives_its_request_up_counts(engine_account, clock, tmp_path):
    engine_account.ready()
    settlements = Settlements(tmp_path / "ledger", monotonic=clock)
    permits = {request_id: settlements.limiter.admit(ALICE, 50) for request_id in ("r1", "r2")}
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 2, clock))
    append_request(tmp_path / "ledger", used(engine_account, "r2", 50, 2, clock))
    asyncio.run(settlements.catch_up())
    settlements.defer("r1", permits["r1"])
    settlements.limiter.admit(ALICE, 10)
    clock.now += 121
    asyncio.run(settlements.catch_up())  # nobody has asked for the other's meanwhile
    assert not settlements._unclaimed
    settlements.defer("r2", permits["r2"])
    with pytest.raises(ApiError):
        settlements.limiter.admit(ALICE, 41)  # 50 and 10 are reserved still


def test_a_look_goes_on_where_the_client_hangs_up_for_whom_it_was(engine_account, clock, tmp_path, monkeypatch):
    engine_account.ready()
    settlements = Settlements(tmp_path / "ledger", monotonic=clock)
    settlements.defer("r1", settlements.limiter.admit(ALICE, 100))
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 2, clock))
    read, has_begun, may_end = settlements._reader.new, threading.Event(), threading.Event()

    def slow():
        has_begun.set()
        may_end.wait(10)
        return read()

    async def hang_up():
        asked = asyncio.create_task(settlements.catch_up())
        await asyncio.to_thread(has_begun.wait, 10)
        asked.cancel()
        await asyncio.wait([asked])
        clock.now += 2
        await settlements.catch_up()  # another's, which does not look beside it
        may_end.set()
        async with asyncio.timeout(10):
            while settlements._waiting:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(settlements._reader, "new", slow)
    asyncio.run(hang_up())
    settlements.limiter.admit(ALICE, 60)
    with pytest.raises(ApiError):
        settlements.limiter.admit(ALICE, 1)


def test_a_request_whose_engine_was_killed_is_let_go_in_the_end(tmp_path, clock):
    settlements = Settlements(tmp_path, monotonic=clock)
    settlements.defer("r1", settlements.limiter.admit(ALICE, 100))
    clock.now += 121
    asyncio.run(settlements.catch_up())
    settlements.limiter.admit(ALICE, 100)


def test_what_was_spent_before_a_restart_counts(engine_account, clock, tmp_path):
    engine_account.ready()
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 51, clock))  # 51 s x 2 x 0.01 USD
    with pytest.raises(ApiError, match="budget"):
        Settlements(tmp_path / "ledger", monotonic=clock).limiter.admit(ALICE, 1)


def test_what_failed_before_its_answer_began_is_not_charged_after_a_restart_either(engine_account, clock, tmp_path):
    engine_account.ready()
    request = engine_account.begin("r1", "alice")
    clock.now += 51
    append_request(tmp_path / "ledger", request.finish("failed"))
    Settlements(tmp_path / "ledger", monotonic=clock).limiter.admit(ALICE, 1)


def test_a_batch_that_has_ended_is_charged_within_half_a_minute(engine_account, clock, tmp_path):
    engine_account.ready()
    settlements = Settlements(tmp_path / "ledger", monotonic=clock)
    asyncio.run(settlements.catch_up())
    used_by_others = used(engine_account, "r1", 40, 51, clock)  # its own answer has told the gate
    append_request(tmp_path / "ledger", used_by_others)
    clock.now += 31
    asyncio.run(settlements.catch_up())
    settlements.limiter.admit(ALICE, 1)
    batch = replace(used_by_others, request_id="batch_1", usage=replace(used_by_others.usage, session_id="batch_1"))
    for _ in range(2):
        write_batch(tmp_path / "ledger", batch)
    asyncio.run(settlements.catch_up())
    settlements.limiter.admit(ALICE, 1)
    clock.now += 31
    asyncio.run(settlements.catch_up())
    with pytest.raises(ApiError, match="budget"):
        settlements.limiter.admit(ALICE, 1)


def test_what_tokens_cost_before_a_restart_is_what_requests_hold(engine_account, clock, tmp_path):
    engine_account.ready()
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 5, clock))  # 0.1 USD
    limiter = Settlements(tmp_path / "ledger", monotonic=clock).limiter
    assert limiter.admit(ALICE, 20, "m").held_usd == pytest.approx(0.05)
    assert limiter.admit(ALICE, 20, "other").held_usd == 0


def test_a_batch_that_the_scheduler_has_settled_is_not_charged_again(engine_account, clock, tmp_path):
    engine_account.ready()
    settlements = Settlements(tmp_path / "ledger", monotonic=clock)
    asyncio.run(settlements.catch_up())
    one = used(engine_account, "batch_1", 40, 26, clock)  # 0.52 USD
    batch = replace(one, usage=replace(one.usage, session_id="batch_1"))
    write_batch(tmp_path / "ledger", batch)
    budgets_of(tmp_path / "ledger").settle_batch("batch_1", "alice", batch.usd)
    clock.now += 31
    asyncio.run(settlements.catch_up())
    assert budgets_of(tmp_path / "ledger").spent_by_batches("alice") == batch.usd
    settlements.limiter.admit(ALICE, 1)
