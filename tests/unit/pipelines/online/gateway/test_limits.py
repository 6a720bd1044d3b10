import asyncio
import contextlib
import itertools
import threading
from dataclasses import replace
from random import Random

import pytest

from peagle.economics.ledger import RequestReader, append_request, write_batch
from peagle.economics.shared_budgets import SharedBudget, edit_budgets
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.limits import ActualUsage, KeyLimits
from pipelines.online.totals import TokenPrice, Totals, totals_of
from pipelines.online.wire import AnswerTally, Context
from tests.unit.pipelines.online.ledgers import make_request_usage

REQUEST_NUMBERS = itertools.count()


def make_key(**limits):
    return KeyRecord(name="alice", sha256="0" * 64, **limits)


def make_price(usd_per_output_token, usd_per_prompt_token=0.0):
    """Return the price after one request on an otherwise idle engine that costs one dollar per second."""
    return TokenPrice(
        num_requests=1,
        usd=1,
        busy_s=1,
        prefill_s=1000 * usd_per_prompt_token,
        prompt_tokens=1000,
        decode_s=1000 * usd_per_output_token,
        steps=1000,
    )


@pytest.fixture
def totals(tmp_path):
    """Totals of an empty ledger."""
    ledger_totals = Totals(tmp_path)
    ledger_totals.catch_up()
    return ledger_totals


@pytest.fixture
def budgets(totals):
    return totals.budgets


@pytest.fixture
def prices(totals):
    return totals.prices


@pytest.fixture
def limits(clock, totals):
    return KeyLimits(totals, monotonic=clock)


def admit_async(limits, record, tokens=1, model="m", prompt=0, request_id=None, **options):
    request_id = request_id or f"r{next(REQUEST_NUMBERS)}"
    return limits.admit(record, model, request_id=request_id, prompt_tokens=prompt, output_tokens=tokens, **options)


def admit(*args, **options):
    return asyncio.run(admit_async(*args, **options))


def refusal(*args, **options):
    with pytest.raises(ApiError) as error:
        admit(*args, **options)
    return error.value


def settle(limits, permit, tokens=0, usd=0.0, prompt=0):
    limits.settle(permit, ActualUsage(prompt_tokens=prompt, output_tokens=tokens, usd=usd))


def spend(limits, record, usd):
    settle(limits, admit(limits, record), usd=usd)


def rate_limit_refusal(limits, record):
    with pytest.raises(ApiError) as error:
        limits.count_request(record)
    return error.value


def test_requests_per_minute_are_limited(clock, limits):
    alice = make_key(requests_per_min=2)
    limits.count_request(alice)
    clock.now += 20
    limits.count_request(alice)
    error = rate_limit_refusal(limits, alice)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "40"})
    clock.now += 39.9
    rate_limit_refusal(limits, alice)
    clock.now += 0.1
    limits.count_request(alice)


def test_refused_requests_do_not_count(clock, limits):
    alice = make_key(requests_per_min=1)
    limits.count_request(alice)
    for _ in range(5):
        rate_limit_refusal(limits, alice)
    clock.now += 60
    limits.count_request(alice)


def test_output_tokens_are_reserved_until_known(clock, limits):
    alice = make_key(output_tokens_per_min=100)
    first = admit(limits, alice, 80)
    assert refusal(limits, alice, 30).retry_after_s == 1
    settle(limits, first, 50, 0)
    admit(limits, alice, 30)
    assert refusal(limits, alice, 30).retry_after_s == pytest.approx(60)
    clock.now += 60
    admit(limits, alice, 30)


def test_prompt_bytes_are_reserved_until_tokens_are_known(clock, limits):
    alice = make_key(input_tokens_per_min=100)
    first = admit(limits, alice, prompt=60)
    error = refusal(limits, alice, prompt=60)
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 1.0)
    assert "100 input tokens a minute" in error.message
    settle(limits, first, prompt=15)
    settle(limits, admit(limits, alice, prompt=85), prompt=20)
    assert admit(limits, make_key(), prompt=10_000)


def test_prompt_above_the_limit_is_admitted_if_the_key_has_no_running_request(clock, limits):
    alice = make_key(input_tokens_per_min=100)
    settle(limits, admit(limits, alice, prompt=99), prompt=99)
    clock.now += 20
    long_permit = admit(limits, alice, prompt=5000)
    assert refusal(limits, alice, prompt=1).retry_after_s == 1.0
    settle(limits, long_permit, prompt=1200)
    clock.now += 10
    assert refusal(limits, alice, prompt=1).retry_after_s == 50.0  # until a minute after the long prompt
    clock.now += 50
    admit(limits, alice, prompt=1)


def test_settle_is_idempotent(limits, budgets):
    alice = make_key(output_tokens_per_min=100, budget_usd=1)
    permit = admit(limits, alice, 10)
    for _ in range(3):
        settle(limits, permit, 10, 0.4)
    admit(limits, alice, 90)
    assert budgets.spent_usd("alice") == 0.4


def test_request_above_the_output_token_limit_gets_400(limits):
    error = refusal(limits, make_key(output_tokens_per_min=100), 101)
    assert (error.status, error.headers()) == (400, {})


def test_concurrent_requests_of_a_key_are_limited(limits):
    alice = make_key(max_parallel_requests=2)
    first, second = admit(limits, alice), admit(limits, alice)
    error = refusal(limits, alice)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "1"})
    assert "2 concurrent requests" in error.message
    for _ in range(2):
        limits.settle(first, None)  # a disconnected request no longer runs, although its tokens are unknown
    admit(limits, alice)
    refusal(limits, alice)
    settle(limits, first, 1, 0)
    refusal(limits, alice)
    settle(limits, second, 1, 0)
    admit(limits, alice)


def test_requests_are_refused_when_the_budget_is_spent(limits):
    alice = make_key(budget_usd=1)
    for usd in (0.9, 0.2):
        spend(limits, alice, usd)
    error = refusal(limits, alice)
    assert (error.status, error.code, error.headers()) == (429, "insufficient_quota", {})
    with pytest.raises(ApiError, match="is spent"):
        asyncio.run(limits.require_budget(alice))


def test_keys_do_not_share_limits(limits):
    limits.count_request(make_key(requests_per_min=1))
    limits.count_request(KeyRecord(name="bob", sha256="1" * 64, requests_per_min=1))


def test_running_requests_reserve_their_maximum_cost(limits, budgets, prices):
    alice = make_key(budget_usd=1)
    spend(limits, alice, 0.51)
    prices["m"] = make_price(0.001)
    first = admit(limits, alice, 300)
    error = refusal(limits, alice, 200)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "1"})
    assert "reserved by running requests" in error.message
    admit(limits, alice, 100)
    assert budgets.reserve_batch("batch_1", "alice", 1) == pytest.approx(0.6)  # the requests reserve 0.3 and 0.1
    budgets.settle_batch("batch_1", ["alice"], 0)
    settle(limits, first, 1, 0.001)
    admit(limits, alice, 200)


def test_prompt_and_output_are_reserved_at_their_prices(limits, prices):
    """Otherwise, a client could overspend with very long prompts and one output token each."""
    alice, prices["m"] = make_key(budget_usd=1), make_price(0.001, 0.0001)
    admit(limits, alice, 1, prompt=4000)
    admit(limits, alice, 1, prompt=4000)
    refusal(limits, alice, 1, prompt=4000)
    admit(limits, alice, 100, prompt=900)


def test_without_a_price_requests_run_one_at_a_time(limits, budgets, prices):
    """Otherwise, a client could overspend a tiny budget with many concurrent requests."""
    alice = make_key(budget_usd=1e-7)
    first = admit(limits, alice)
    for model in ("m", "another"):
        assert "reserved by running requests" in refusal(limits, alice, model=model).message
    assert budgets.reserve_batch("batch_1", "alice", 1e-7) == 0
    prices["m"] = make_price(1e-9)
    refusal(limits, alice)  # the cost of the first request is still unknown
    settle(limits, first, 1, 5e-8)
    admit(limits, alice)
    refusal(limits, alice, model="another")  # not concurrently with another request
    admit(limits, alice)


def test_reservation_of_a_disconnected_request_expires_after_two_minutes(limits, clock):
    alice = make_key(budget_usd=1)
    limits.settle(admit(limits, alice), None)
    refusal(limits, alice)
    clock.now += 119
    refusal(limits, alice)
    clock.now += 2
    admit(limits, alice)


def test_nearly_spent_budget_admits_one_request_at_a_time(limits, prices):
    alice = make_key(budget_usd=1)
    spend(limits, alice, 0.999)
    prices["m"] = make_price(0.001)
    permit = admit(limits, alice, 100)
    refusal(limits, alice, 100)
    settle(limits, permit, 0, 0)
    admit(limits, alice, 100)


def test_requests_cannot_spend_the_reservation_of_a_batch(limits, budgets):
    alice = make_key(budget_usd=1)
    assert budgets.reserve_batch("batch_1", "alice", 1) == 1
    error = refusal(limits, alice)
    assert (error.code, error.headers()) == ("rate_limit_exceeded", {"retry-after": "60"})
    asyncio.run(limits.require_budget(alice))  # free actions, such as creating a batch, are allowed
    for _ in range(2):
        budgets.settle_batch("batch_1", ["alice"], 0.6)
    settle(limits, admit(limits, alice), 1, 0.4)
    assert refusal(limits, alice).code == "insufficient_quota"


@pytest.mark.parametrize("seed", range(30))
def test_budget_is_overspent_by_at_most_one_request(seed, totals, clock):
    """Start and end requests to two models in random order. One model has no price at first."""
    asyncio.run(spend_randomly(Random(seed), KeyLimits(totals, monotonic=clock), totals.budgets, totals.prices))


async def spend_randomly(random, limits, budgets, prices):
    prices["m"] = make_price(0.01, 0.001)
    alice, running, has_batch = make_key(budget_usd=1), [], False
    above_reservations_usd = highest_usd = 0.0  # total cost above reservations; cost of the most expensive request
    for step in range(400):
        if step == 200:
            prices["new"] = make_price(0.02, 0.002)
        if random.random() < 0.6:
            model, tokens, prompt = random.choice(["m", "new"]), random.randint(1, 30), random.randint(0, 200)
            reserved_usd = (
                prices[model].max_usd(prompt_tokens=prompt, output_tokens=tokens) if model in prices else None
            )
            with contextlib.suppress(ApiError):
                running.append((await admit_async(limits, alice, tokens, model, prompt), reserved_usd))
        elif running:
            permit, reserved_usd = running.pop(random.randrange(len(running)))
            usd = random.uniform(0, 1.3) * (reserved_usd or 0.2)  # prices may be 30 % too low; 0.2: no price yet
            above_reservations_usd += max(0.0, usd - reserved_usd) if reserved_usd is not None else 0.0
            highest_usd = max(highest_usd, usd)
            settle(limits, permit, 1, usd)
        elif not has_batch:
            has_batch = budgets.reserve_batch("b", "alice", 1 - budgets.spent_usd("alice")) > 0
    for permit, reserved_usd in running:
        usd = 1.3 * (reserved_usd or 0.2)
        above_reservations_usd += usd - reserved_usd if reserved_usd is not None else 0.0
        highest_usd = max(highest_usd, usd)
        settle(limits, permit, 1, usd)
    assert budgets.spent_usd("alice") <= 1 + highest_usd + above_reservations_usd


@pytest.fixture
def tag_budget(totals):
    """A monthly budget of one dollar for a tag."""
    with edit_budgets(totals.folder / "budgets.json") as budgets:
        budgets["team=search"] = SharedBudget(name="team=search", budget_usd=1, budget_every="month")


def admit_tagged(limits, record, request_id):
    return admit(limits, record, request_id=request_id, tags='{"team": "search", "x": "y"}')


@pytest.mark.usefixtures("tag_budget")
def test_requests_reserve_and_spend_tag_budgets(limits, budgets, prices):
    prices["m"] = make_price(0.6)
    alice, bob = make_key(budget_usd=10), KeyRecord(name="bob", sha256="1" * 64)
    permit = admit_tagged(limits, alice, "1")
    with pytest.raises(
        ApiError, match="the budget of \\$1 a month for team=search is reserved by running requests"
    ) as error:
        admit_tagged(limits, bob, "2")
    assert error.value.code == "rate_limit_exceeded"
    assert budgets.reserve_request("3", "bob", 0.5, 0.5) is None, "a refused request reserves nothing"
    settle(limits, permit, usd=1.0)
    with pytest.raises(ApiError, match="for team=search is spent"):
        admit_tagged(limits, bob, "4")
    with pytest.raises(ApiError, match="for team=search is spent"):
        asyncio.run(limits.require_budget(bob, '{"team": "search"}'))
    admit(limits, bob)
    assert [budgets.spent_usd(account) for account in ("alice", "team=search", "x=y")] == [1.0, 1.0, 0.0]


def test_spent_endpoint_budget_refuses_all_keys(limits, budgets, totals):
    with edit_budgets(totals.folder / "budgets.json") as shared:
        shared["endpoint"] = SharedBudget(name="endpoint", budget_usd=5)
    budgets.reserve_batch("batch_1", "*", 5)  # reservations do not count, only spent dollars
    admit(limits, make_key())
    budgets.set_external_spend({"*": {1: 4.0, 2: 1.0}}, {})  # $4 on day 1, $1 on day 2
    error = refusal(limits, make_key())
    assert (error.code, str(error)) == ("insufficient_quota", "the budget of this endpoint is spent")


# --- usage from the ledger

ALICE = KeyRecord(name="alice", sha256="0" * 64, output_tokens_per_min=100)
ALICE_WITH_BUDGET = ALICE.model_copy(update={"budget_usd": 1, "output_tokens_per_min": None})


def usage_of_cut_request(account, request_id, tokens, busy_s, clock):
    request = account.begin(Context(request_id=request_id, key="alice"))
    clock.now += busy_s
    request.tally = AnswerTally(num_output_tokens=tokens)
    return request.finish("cut")


def assert_refused(limits, record, tokens, message):
    assert message in refusal(limits, record, tokens, request_id="refused").message


@pytest.fixture
def ledger_limits(engine_account, tmp_path, clock):
    engine_account.ready()
    key_limits = KeyLimits(totals_of(tmp_path / "ledger"), monotonic=clock)
    assert asyncio.run(key_limits._totals.wait_until_loaded())
    return key_limits


@pytest.fixture
def restart(engine_account, tmp_path, clock):
    """Return a function that creates the limits of a restarted ingress, with the same ledger."""

    def start():
        totals_of.cache_clear()
        return KeyLimits(totals_of(tmp_path / "ledger"), monotonic=clock)

    engine_account.ready()
    return start


def test_tokens_of_a_disconnected_request_count(ledger_limits, engine_account, clock, tmp_path):
    ledger_limits.settle(admit(ledger_limits, ALICE, 100, request_id="r1"), None)
    assert_refused(ledger_limits, ALICE, 50, "output tokens a minute")
    append_request(tmp_path / "ledger", usage_of_cut_request(engine_account, "r1", 40, 2, clock))
    admit(ledger_limits, ALICE, 60)
    assert_refused(ledger_limits, ALICE, 1, "output tokens a minute")


def test_cost_of_a_disconnected_request_counts(ledger_limits, engine_account, clock, tmp_path):
    ledger_limits.settle(admit(ledger_limits, ALICE_WITH_BUDGET, 100, request_id="r1"), None)
    assert_refused(ledger_limits, ALICE_WITH_BUDGET, 1, "reserved by running requests")
    # The request costs 51 s x 2 devices x 0.01 USD.
    append_request(tmp_path / "ledger", usage_of_cut_request(engine_account, "r1", 0, 51, clock))
    assert_refused(ledger_limits, ALICE_WITH_BUDGET, 1, "is spent")


def test_record_read_before_the_disconnect_counts(ledger_limits, engine_account, clock, tmp_path):
    permits = {request_id: admit(ledger_limits, ALICE, 50, request_id=request_id) for request_id in ("r1", "r2")}
    append_request(tmp_path / "ledger", usage_of_cut_request(engine_account, "r1", 40, 2, clock))
    asyncio.run(ledger_limits.catch_up())
    ledger_limits.settle(permits["r1"], None)
    admit(ledger_limits, ALICE, 10)
    assert_refused(ledger_limits, ALICE, 1, "output tokens a minute")
    assert not ledger_limits._waiting


async def test_ledger_read_continues_after_a_client_disconnect(
    ledger_limits, engine_account, clock, tmp_path, monkeypatch
):
    ledger_limits.settle(await admit_async(ledger_limits, ALICE, 100, request_id="r1"), None)
    append_request(tmp_path / "ledger", usage_of_cut_request(engine_account, "r1", 40, 2, clock))
    read, has_begun, may_end = ledger_limits._totals.catch_up, threading.Event(), threading.Event()

    def read_slowly():
        has_begun.set()
        may_end.wait(10)
        return read()

    monkeypatch.setattr(ledger_limits._totals, "catch_up", read_slowly)
    read_task = asyncio.create_task(ledger_limits.catch_up())
    await asyncio.to_thread(has_begun.wait, 10)
    read_task.cancel()
    await asyncio.wait([read_task])
    clock.now += 2
    await ledger_limits.catch_up()  # another request's call, which does not start a second read
    may_end.set()
    async with asyncio.timeout(10):
        while ledger_limits._waiting:
            await asyncio.sleep(0.01)
    await admit_async(ledger_limits, ALICE, 60)
    with pytest.raises(ApiError, match="output tokens a minute"):
        await admit_async(ledger_limits, ALICE, 1)


def test_spend_before_a_restart_counts(restart, engine_account, clock, tmp_path):
    # The request costs 51 s x 2 devices x 0.01 USD.
    append_request(tmp_path / "ledger", usage_of_cut_request(engine_account, "r1", 40, 51, clock))
    assert_refused(restart(), ALICE_WITH_BUDGET, 1, "is spent")


def test_requests_running_at_a_restart_count_when_recorded(restart, engine_account, clock, tmp_path):
    admit(restart(), ALICE_WITH_BUDGET, 1, request_id="r1")
    limits = restart()
    permit = admit(limits, ALICE_WITH_BUDGET, 1, request_id="r2")
    limits.settle(permit, ActualUsage(output_tokens=1, usd=0.01))
    append_request(tmp_path / "ledger", usage_of_cut_request(engine_account, "r1", 40, 51, clock))
    assert_refused(limits, ALICE_WITH_BUDGET, 1, "is spent")


def test_ended_batch_is_charged_within_half_a_minute(ledger_limits, engine_account, clock, tmp_path):
    asyncio.run(ledger_limits.catch_up())
    clock.now += 121  # the ledger is read every second only in the first two minutes
    asyncio.run(ledger_limits.catch_up())
    batch = replace(usage_of_cut_request(engine_account, "batch_1", 40, 0, clock), usd=1.02)
    for _ in range(2):
        write_batch(tmp_path / "ledger", replace(batch, usage=replace(batch.usage, session_id="batch_1")))
    asyncio.run(ledger_limits.catch_up())
    ledger_limits.settle(admit(ledger_limits, ALICE_WITH_BUDGET, 1), ActualUsage(output_tokens=0, usd=0))
    clock.now += 31
    assert_refused(ledger_limits, ALICE_WITH_BUDGET, 1, "is spent")


def test_token_prices_survive_a_restart(restart, tmp_path):
    append_request(tmp_path / "ledger", make_request_usage(key="bob"))  # 0.0005 USD per output token
    limits = restart()
    admit(limits, ALICE_WITH_BUDGET, 999, request_id="r1")
    admit(limits, ALICE_WITH_BUDGET, 999, request_id="r2")
    assert_refused(limits, ALICE_WITH_BUDGET, 99, "reserved by running requests")


def test_model_has_a_price_one_second_after_its_first_answer(ledger_limits, clock, tmp_path):
    clock.now += 200
    asyncio.run(ledger_limits.catch_up())
    first = admit(ledger_limits, ALICE_WITH_BUDGET, 1, request_id="r1")
    assert_refused(ledger_limits, ALICE_WITH_BUDGET, 1, "reserved by running requests")
    append_request(tmp_path / "ledger", make_request_usage("r1"))
    ledger_limits.settle(first, ActualUsage(output_tokens=41, usd=0.022))  # as in `make_request_usage`
    clock.now += 1
    admit(ledger_limits, ALICE_WITH_BUDGET, 1, request_id="r2")
    admit(ledger_limits, ALICE_WITH_BUDGET, 1, request_id="r3")


def test_only_keys_without_budget_are_admitted_while_the_ledger_is_read(restart, tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(RequestReader, "iter_new", lambda reader: iter(may_end.wait(10) and ()))
    monkeypatch.setattr("pipelines.online.totals._MAX_WAIT_S", 0.1)
    limits = restart()
    admit(limits, ALICE.model_copy(update={"name": "bob"}), 1, request_id="r1")
    for admission in (
        limits.admit(ALICE_WITH_BUDGET, "m", request_id="r2", prompt_tokens=0, output_tokens=1),
        limits.require_budget(ALICE_WITH_BUDGET),
    ):
        with pytest.raises(ApiError) as error:
            asyncio.run(admission)
        assert (error.value.status, error.value.headers()) == (503, {"retry-after": "5"})
    may_end.set()
    monkeypatch.setattr("pipelines.online.totals._MAX_WAIT_S", 10)
    admit(limits, ALICE_WITH_BUDGET, 1, request_id="r2")
