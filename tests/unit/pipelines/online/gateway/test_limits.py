import contextlib
import itertools
from random import Random

import pytest

from pipelines.online.errors import ApiError
from pipelines.online.gateway.budgets import Budgets
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.limits import Limiter
from pipelines.online.sums import TokenPrice

NUMBERS = itertools.count()


def key(**limits):
    return KeyRecord(name="alice", sha256="0" * 64, **limits)


def a_price(usd_per_output_token, usd_per_prompt_token=0.0):
    """As of one request, alone on an engine of a dollar a second."""
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
def budgets():
    return Budgets()


@pytest.fixture
def prices():
    return {}


@pytest.fixture
def limiter(clock, budgets, prices):
    return Limiter(budgets, prices, monotonic=clock)


def admit(limiter, record, tokens=1, model="m", prompt=0):
    return limiter.admit(record, tokens, model, prompt_tokens=prompt, request_id=f"r{next(NUMBERS)}")


def refusal(limiter, record, tokens=1, model="m", prompt=0):
    with pytest.raises(ApiError) as caught:
        admit(limiter, record, tokens, model, prompt)
    return caught.value


def spend(limiter, record, usd):
    limiter.settle(admit(limiter, record), output_tokens=0, usd=usd)


def too_often(limiter, record, **how):
    with pytest.raises(ApiError) as caught:
        limiter.count(record, **how)
    return caught.value


def test_requests_of_the_last_minute_are_limited_and_the_wait_is_exact(clock, limiter):
    alice = key(requests_per_min=2)
    limiter.count(alice)
    clock.now += 20
    limiter.count(alice)
    error = too_often(limiter, alice)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "40"})
    clock.now += 39.9
    too_often(limiter, alice)
    clock.now += 0.1
    limiter.count(alice)


def test_what_came_too_often_does_not_count(clock, limiter):
    alice = key(requests_per_min=1)
    limiter.count(alice)
    for _ in range(5):
        too_often(limiter, alice)
    clock.now += 60
    limiter.count(alice)


def test_live_figures_are_asked_for_every_second_whatever_else_a_key_may(clock, limiter):
    alice = key(requests_per_min=1)
    limiter.count(alice)
    for _ in range(60):
        limiter.count(alice, is_poll=True)
    assert "60 requests for live figures a minute" in too_often(limiter, alice, is_poll=True).message
    clock.now += 60
    limiter.count(alice)
    limiter.count(alice, is_poll=True)


def test_tokens_are_held_until_they_are_known(clock, limiter):
    alice = key(output_tokens_per_min=100)
    first = admit(limiter, alice, 80)
    assert refusal(limiter, alice, 30).retry_after_s == 1
    limiter.settle(first, output_tokens=50, usd=0)
    admit(limiter, alice, 30)
    assert refusal(limiter, alice, 30).retry_after_s == pytest.approx(60)
    clock.now += 60
    admit(limiter, alice, 30)


def test_settling_twice_is_settling_once(limiter, budgets):
    alice = key(output_tokens_per_min=100, budget_usd=1)
    permit = admit(limiter, alice, 10)
    for _ in range(3):
        limiter.settle(permit, output_tokens=10, usd=0.4)
    admit(limiter, alice, 90)
    assert budgets.spent_usd("alice") == 0.4


def test_more_than_a_minute_holds_is_not_a_matter_of_waiting(limiter):
    error = refusal(limiter, key(output_tokens_per_min=100), 101)
    assert (error.status, error.headers()) == (400, {})


def test_no_more_requests_are_under_way_than_a_key_may_have_at_once(limiter):
    alice = key(max_parallel_requests=2)
    first, second = admit(limiter, alice), admit(limiter, alice)
    error = refusal(limiter, alice)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "1"})
    assert "2 requests under way at once" in error.message
    for _ in range(2):
        limiter.leave(first)  # its client did: it makes room though its tokens are not known yet
    admit(limiter, alice)
    refusal(limiter, alice)
    limiter.settle(first, output_tokens=1, usd=0)
    refusal(limiter, alice)
    limiter.settle(second, output_tokens=1, usd=0)
    admit(limiter, alice)


def test_a_budget_counts_what_was_spent(limiter):
    alice = key(budget_usd=1)
    for usd in (0.9, 0.2):
        spend(limiter, alice, usd)
    error = refusal(limiter, alice)
    assert (error.status, error.code, error.headers()) == (429, "insufficient_quota", {})
    with pytest.raises(ApiError, match="is spent"):
        limiter.require_budget(alice)


def test_keys_do_not_share_limits(limiter):
    limiter.count(key(requests_per_min=1))
    limiter.count(KeyRecord(name="bob", sha256="1" * 64, requests_per_min=1))


def test_requests_under_way_hold_what_their_tokens_may_cost(limiter, budgets, prices):
    alice = key(budget_usd=1)
    spend(limiter, alice, 0.51)
    prices["m"] = a_price(0.001)
    first = admit(limiter, alice, 300)
    error = refusal(limiter, alice, 200)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "1"})
    assert "held by its requests under way" in error.message
    admit(limiter, alice, 100)
    assert budgets.hold_rest("batch_1", "alice", 1) == pytest.approx(0.6)
    budgets.settle_batch("batch_1", "alice", 0)
    limiter.settle(first, output_tokens=1, usd=0.001)
    admit(limiter, alice, 200)


def test_prompt_and_output_are_held_each_at_its_price(limiter, prices):
    """The attack: prompts that are much longer than usual, of which each held its one output token."""
    alice, prices["m"] = key(budget_usd=1), a_price(0.001, 0.0001)
    admit(limiter, alice, 1, prompt=4000)
    admit(limiter, alice, 1, prompt=4000)
    refusal(limiter, alice, 1, prompt=4000)
    admit(limiter, alice, 100, prompt=900)


def test_without_a_price_one_request_of_a_key_is_under_way_at_a_time(limiter, budgets, prices):
    """The attack: sixty at once on a budget of a ten-millionth of a dollar."""
    alice = key(budget_usd=1e-7)
    first = admit(limiter, alice)
    for model in ("m", "another"):
        assert "held by its requests under way" in refusal(limiter, alice, model=model).message
    assert budgets.hold_rest("batch_1", "alice", 1e-7) == 0
    prices["m"] = a_price(1e-9)
    refusal(limiter, alice)  # the first may cost anything still
    limiter.settle(first, output_tokens=1, usd=5e-8)
    admit(limiter, alice)
    refusal(limiter, alice, model="another")  # it never is beside another
    admit(limiter, alice)


def test_who_left_holds_on_to_the_budget_until_the_ledger_has_told(limiter, prices):
    alice = key(budget_usd=1)
    first = admit(limiter, alice)
    limiter.leave(first)
    refusal(limiter, alice)
    limiter.settle(first, output_tokens=0, usd=None)
    admit(limiter, alice)


def test_with_little_left_requests_get_in_one_at_a_time(limiter, prices):
    alice = key(budget_usd=1)
    spend(limiter, alice, 0.999)
    prices["m"] = a_price(0.001)
    only = admit(limiter, alice, 100)
    refusal(limiter, alice, 100)
    limiter.settle(only, output_tokens=0, usd=0)
    admit(limiter, alice, 100)


def test_what_a_batch_holds_of_a_budget_requests_cannot_spend(limiter, budgets):
    alice = key(budget_usd=1)
    assert budgets.hold_rest("batch_1", "alice", 1) == 1
    error = refusal(limiter, alice)
    assert (error.code, error.headers()) == ("rate_limit_exceeded", {"retry-after": "60"})
    limiter.require_budget(alice)  # what costs nothing, as an order
    for _ in range(2):
        budgets.settle_batch("batch_1", "alice", 0.6)
    limiter.settle(admit(limiter, alice), output_tokens=1, usd=0.4)
    assert refusal(limiter, alice).code == "insufficient_quota"


@pytest.mark.parametrize("seed", range(30))
def test_a_budget_is_overspent_by_one_request_and_by_what_some_cost_beyond_what_they_held(seed):
    """Whatever comes when: requests of two models, one of them without a price at first, batches, ends in any order."""
    random = Random(seed)
    budgets, prices = Budgets(), {"m": a_price(0.01, 0.001)}
    limiter, alice, under_way, is_batch_on = Limiter(budgets, prices), key(budget_usd=1), [], False
    beyond_usd = dearest_usd = 0.0
    for step in range(400):
        if step == 200:
            prices["new"] = a_price(0.02, 0.002)
        if random.random() < 0.6:
            model, tokens, prompt = random.choice(["m", "new"]), random.randint(1, 30), random.randint(0, 200)
            held_usd = prices[model].of(prompt_tokens=prompt, output_tokens=tokens) if model in prices else None
            with contextlib.suppress(ApiError):
                under_way.append((admit(limiter, alice, tokens, model, prompt), held_usd))
        elif under_way:
            permit, held_usd = under_way.pop(random.randrange(len(under_way)))
            usd = random.uniform(0, 1.3) * (held_usd or 0.2)
            beyond_usd += max(0.0, usd - held_usd) if held_usd is not None else 0.0
            dearest_usd = max(dearest_usd, usd)
            limiter.settle(permit, output_tokens=1, usd=usd)
        elif not is_batch_on:
            is_batch_on = budgets.hold_rest("b", "alice", 1 - budgets.spent_usd("alice")) > 0
    for permit, held_usd in under_way:
        usd = 1.3 * (held_usd or 0.2)
        beyond_usd += usd - held_usd if held_usd is not None else 0.0
        dearest_usd = max(dearest_usd, usd)
        limiter.settle(permit, output_tokens=1, usd=usd)
    assert budgets.spent_usd("alice") <= 1 + dearest_usd + beyond_usd
