import pytest

from pipelines.online.budgets import Budgets
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord
from pipelines.online.limits import Limiter


def key(**limits):
    return KeyRecord(name="alice", sha256="0" * 64, **limits)


def refusal(limiter, record, tokens=1, model=None):
    with pytest.raises(ApiError) as caught:
        limiter.admit(record, tokens, model)
    return caught.value


def too_often(limiter, record, **how):
    with pytest.raises(ApiError) as caught:
        limiter.count(record, **how)
    return caught.value


def test_requests_of_the_last_minute_are_limited_and_the_wait_is_exact(clock):
    limiter, alice = Limiter(monotonic=clock), key(requests_per_min=2)
    limiter.count(alice)
    clock.now += 20
    limiter.count(alice)
    error = too_often(limiter, alice)
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "40"})
    clock.now += 39.9
    too_often(limiter, alice)
    clock.now += 0.1
    limiter.count(alice)


def test_what_came_too_often_does_not_count(clock):
    limiter, alice = Limiter(monotonic=clock), key(requests_per_min=1)
    limiter.count(alice)
    for _ in range(5):
        too_often(limiter, alice)
    clock.now += 60
    limiter.count(alice)


def test_live_figures_are_asked_for_every_second_whatever_else_a_key_may(clock):
    limiter, alice = Limiter(monotonic=clock), key(requests_per_min=1)
    limiter.count(alice)
    for _ in range(60):
        limiter.count(alice, is_poll=True)
    assert "60 requests for live figures a minute" in too_often(limiter, alice, is_poll=True).message
    clock.now += 60
    limiter.count(alice)
    limiter.count(alice, is_poll=True)


def test_tokens_are_held_until_they_are_known(clock):
    limiter, alice = Limiter(monotonic=clock), key(output_tokens_per_min=100)
    first = limiter.admit(alice, 80)
    assert refusal(limiter, alice, 30).retry_after_s == 1
    limiter.settle(first, output_tokens=50, usd=0)
    limiter.admit(alice, 30)
    assert refusal(limiter, alice, 30).retry_after_s == pytest.approx(60)
    clock.now += 60
    limiter.admit(alice, 30)


def test_settling_twice_is_settling_once(clock):
    limiter, alice = Limiter(monotonic=clock), key(output_tokens_per_min=100, budget_usd=1)
    permit = limiter.admit(alice, 10)
    for _ in range(3):
        limiter.settle(permit, output_tokens=10, usd=0.4)
    limiter.admit(alice, 90)


def test_more_than_a_minute_holds_is_not_a_matter_of_waiting(clock):
    error = refusal(Limiter(monotonic=clock), key(output_tokens_per_min=100), 101)
    assert (error.status, error.headers()) == (400, {})


def test_a_budget_counts_what_the_ledger_knows(clock):
    limiter, alice = Limiter(monotonic=clock), key(budget_usd=1)
    limiter.spend("alice", "m", output_tokens=0, usd=0.9)
    limiter.settle(limiter.admit(alice, 1), output_tokens=1, usd=0.2)
    error = refusal(limiter, alice)
    assert (error.status, error.code, error.headers()) == (429, "insufficient_quota", {})


def test_keys_do_not_share_limits(clock):
    limiter = Limiter(monotonic=clock)
    limiter.count(key(requests_per_min=1))
    limiter.count(KeyRecord(name="bob", sha256="1" * 64, requests_per_min=1))


def test_requests_under_way_hold_what_their_tokens_may_cost(clock):
    budgets = Budgets()
    limiter, alice = Limiter(budgets=budgets, monotonic=clock), key(budget_usd=1)
    limiter.spend("alice", "m", output_tokens=0, usd=0.5)
    limiter.settle(limiter.admit(alice, 50, "m"), output_tokens=10, usd=0.01)
    limiter.admit(alice, 100, "other")  # of whose price nothing is known
    first = limiter.admit(alice, 300, "m")
    error = refusal(limiter, alice, 200, "m")
    assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"retry-after": "1"})
    assert "held by its requests under way" in error.message
    limiter.admit(alice, 100, "m")
    assert budgets.hold_rest("batch_1", "alice", 1) == pytest.approx(0.6)
    budgets.settle_batch("batch_1", "alice", 0)
    limiter.settle(first, output_tokens=1, usd=0.001)
    limiter.admit(alice, 200, "m")


def test_with_little_left_requests_get_in_one_at_a_time(clock):
    limiter, alice = Limiter(monotonic=clock), key(budget_usd=1)
    limiter.spend("alice", "m", output_tokens=0, usd=0.999)
    limiter.spend("bob", "m", output_tokens=10, usd=0.01)
    only = limiter.admit(alice, 100, "m")
    refusal(limiter, alice, 100, "m")
    limiter.settle(only, output_tokens=0, usd=0)
    limiter.admit(alice, 100, "m")


def test_the_price_of_a_token_is_that_of_late(clock):
    limiter, alice = Limiter(monotonic=clock), key(budget_usd=1)
    for usd in [0.1] * 50 + [0.01] * 200:
        limiter.spend("bob", "m", output_tokens=10, usd=usd)
    assert limiter.admit(alice, 10, "m").held_usd == pytest.approx(0.01, rel=0.25)


def test_what_a_batch_holds_of_a_budget_requests_cannot_spend(clock):
    budgets = Budgets()
    limiter, alice = Limiter(budgets=budgets, monotonic=clock), key(budget_usd=1)
    assert budgets.hold_rest("batch_1", "alice", 1) == 1
    error = refusal(limiter, alice)
    assert (error.code, error.headers()) == ("rate_limit_exceeded", {"retry-after": "60"})
    limiter.admit(alice, 0)  # what costs nothing, as an order
    for _ in range(2):
        budgets.settle_batch("batch_1", "alice", 0.6)
    limiter.settle(limiter.admit(alice, 1), output_tokens=1, usd=0.4)
    assert refusal(limiter, alice).code == "insufficient_quota"
