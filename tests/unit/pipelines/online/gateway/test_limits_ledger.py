import asyncio
import threading
from dataclasses import replace

import pytest

from peagle.economics.ledger import RequestReader, append_request, write_batch
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.limits import ActualUsage, KeyLimits
from pipelines.online.totals import totals_of
from pipelines.online.wire import AnswerTally, Context
from tests.unit.pipelines.online.ledgers import a_request

ALICE = KeyRecord(name="alice", sha256="0" * 64, output_tokens_per_min=100)
POOR = ALICE.model_copy(update={"budget_usd": 1, "output_tokens_per_min": None})


def used(account, request_id, tokens, busy_s, clock):
    request = account.begin(Context(request_id=request_id, key="alice"))
    clock.now += busy_s
    request.tally = AnswerTally(num_output_tokens=tokens)
    return request.finish("cut")


def admit(limits, key, tokens, request_id="r", model="m"):
    return asyncio.run(limits.admit(key, model, request_id=request_id, prompt_tokens=0, output_tokens=tokens))


def refused(limits, key, tokens, match):
    with pytest.raises(ApiError, match=match):
        admit(limits, key, tokens, "refused")


@pytest.fixture
def limits(engine_account, tmp_path, clock):
    engine_account.ready()
    key_limits = KeyLimits(totals_of(tmp_path / "ledger"), monotonic=clock)
    assert asyncio.run(key_limits._totals.wait_until_loaded())
    return key_limits


@pytest.fixture
def restarted(engine_account, tmp_path, clock):
    """Start another ingress with the same ledger."""

    def start():
        totals_of.cache_clear()
        return KeyLimits(totals_of(tmp_path / "ledger"), monotonic=clock)

    engine_account.ready()
    return start


def test_tokens_of_a_disconnected_request_count(limits, engine_account, clock, tmp_path):
    limits.settle(admit(limits, ALICE, 100, "r1"), None)
    refused(limits, ALICE, 50, "output tokens a minute")
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 2, clock))
    admit(limits, ALICE, 60)
    refused(limits, ALICE, 1, "output tokens a minute")


def test_cost_of_a_disconnected_request_counts(limits, engine_account, clock, tmp_path):
    limits.settle(admit(limits, POOR, 100, "r1"), None)
    refused(limits, POOR, 1, "reserved by running requests")
    append_request(tmp_path / "ledger", used(engine_account, "r1", 0, 51, clock))  # 51 s x 2 x 0.01 USD
    refused(limits, POOR, 1, "is spent")


def test_record_read_before_the_disconnect_counts(limits, engine_account, clock, tmp_path):
    permits = {request_id: admit(limits, ALICE, 50, request_id) for request_id in ("r1", "r2")}
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 2, clock))
    asyncio.run(limits.catch_up())
    limits.settle(permits["r1"], None)
    admit(limits, ALICE, 10)
    refused(limits, ALICE, 1, "output tokens a minute")
    assert not limits._waiting


def test_ledger_read_survives_a_client_disconnect(limits, engine_account, clock, tmp_path, monkeypatch):
    limits.settle(admit(limits, ALICE, 100, "r1"), None)
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 2, clock))
    read, has_begun, may_end = limits._totals.catch_up, threading.Event(), threading.Event()

    def slow():
        has_begun.set()
        may_end.wait(10)
        return read()

    async def hang_up():
        asked = asyncio.create_task(limits.catch_up())
        await asyncio.to_thread(has_begun.wait, 10)
        asked.cancel()
        await asyncio.wait([asked])
        clock.now += 2
        await limits.catch_up()  # of another request, which does not read the ledger again
        may_end.set()
        async with asyncio.timeout(10):
            while limits._waiting:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(limits._totals, "catch_up", slow)
    asyncio.run(hang_up())
    admit(limits, ALICE, 60)
    refused(limits, ALICE, 1, "output tokens a minute")


def test_spend_before_a_restart_counts(restarted, engine_account, clock, tmp_path):
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 51, clock))  # 51 s x 2 x 0.01 USD
    refused(restarted(), POOR, 1, "is spent")


def test_requests_running_at_a_restart_count_when_recorded(restarted, engine_account, clock, tmp_path):
    admit(restarted(), POOR, 1, "r1")
    after = restarted()
    permit = admit(after, POOR, 1, "r2")
    after.settle(permit, ActualUsage(output_tokens=1, usd=0.01))
    append_request(tmp_path / "ledger", used(engine_account, "r1", 40, 51, clock))
    refused(after, POOR, 1, "is spent")


def test_ended_batch_is_charged_within_half_a_minute(limits, engine_account, clock, tmp_path):
    asyncio.run(limits.catch_up())
    clock.now += 121  # after a start, the ledger is read each second
    asyncio.run(limits.catch_up())
    batch = replace(used(engine_account, "batch_1", 40, 0, clock), usd=1.02)
    for _ in range(2):
        write_batch(tmp_path / "ledger", replace(batch, usage=replace(batch.usage, session_id="batch_1")))
    asyncio.run(limits.catch_up())
    limits.settle(admit(limits, POOR, 1), ActualUsage(output_tokens=0, usd=0))
    clock.now += 31
    refused(limits, POOR, 1, "is spent")


def test_token_prices_survive_a_restart(restarted, tmp_path):
    append_request(tmp_path / "ledger", a_request(key="bob"))  # 0.0005 USD an output token
    after = restarted()
    admit(after, POOR, 999, "r1")
    admit(after, POOR, 999, "r2")
    refused(after, POOR, 99, "reserved by running requests")


def test_model_has_a_price_soon_after_its_first_answer(limits, clock, tmp_path):
    clock.now += 200
    asyncio.run(limits.catch_up())
    first = admit(limits, POOR, 1, "r1")
    refused(limits, POOR, 1, "reserved by running requests")
    append_request(tmp_path / "ledger", a_request("r1"))
    limits.settle(first, ActualUsage(output_tokens=41, usd=0.022))
    clock.now += 1
    admit(limits, POOR, 1, "r2")
    admit(limits, POOR, 1, "r3")


def test_only_keys_without_budget_are_admitted_while_the_ledger_is_read(restarted, tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(RequestReader, "each", lambda reader: iter(may_end.wait(10) and ()))
    monkeypatch.setattr("pipelines.online.totals._SOON_S", 0.1)
    after = restarted()
    admit(after, ALICE.model_copy(update={"name": "bob"}), 1, "r1")
    for key_name in (
        after.admit(POOR, "m", request_id="r2", prompt_tokens=0, output_tokens=1),
        after.require_budget(POOR),
    ):
        with pytest.raises(ApiError) as caught:
            asyncio.run(key_name)
        assert (caught.value.status, caught.value.headers()) == (503, {"retry-after": "5"})
    may_end.set()
    monkeypatch.setattr("pipelines.online.totals._SOON_S", 10)
    admit(after, POOR, 1, "r2")
