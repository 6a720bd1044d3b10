from dataclasses import replace
from datetime import UTC, date, datetime
from threading import Barrier, Thread

import pytest

from peagle.economics.ledger import append_request
from pipelines.online.budgets import Budgets
from pipelines.online.gateway.keys import new_key
from pipelines.online.totals import Totals, totals_of
from tests.unit.pipelines.online.ledgers import make_request_usage


def test_batch_reserves_the_budget_that_requests_have_not_reserved():
    budgets = Budgets()
    budgets.reserve_request("1", "alice", None, 0.75)
    budgets.reserve_request("2", "bob", None, 5)
    assert budgets.reserve_batch("batch_1", "alice", 2) == 1.25
    assert (budgets.reserved_by_batches("alice"), budgets.reserved_by_batches("bob")) == (1.25, 0)
    assert budgets.reserve_batch("batch_2", "alice", 0.5) == 0
    assert (budgets.reserved_by_batch("batch_1", "alice"), budgets.reserved_by_batch("batch_2", "alice")) == (1.25, 0)


def test_batch_reservation_can_grow():
    budgets = Budgets()
    assert budgets.reserve_batch("batch_1", "alice", 2, 0.5) == 0.5
    assert budgets.reserve_request("1", "alice", 2, 1) is None
    assert budgets.reserve_request("2", "alice", 2, 0.6) == "reserved by requests"
    assert budgets.reserve_batch("batch_1", "alice", 2, 5) == 1
    assert budgets.reserve_batch("batch_2", "alice", 2, 5) == 0, "a request and a batch have reserved everything"
    assert (budgets.reserved_by_batch("batch_1", "alice"), budgets.reserved_by_batches("alice")) == (1, 1)


def test_retried_batch_reserves_and_settles_once():
    budgets = Budgets()
    for left_usd in (2, 1.5):
        budgets.reserve_batch("batch_1", "alice", left_usd)
    assert budgets.reserved_by_batches("alice") == 1.5
    for _ in range(2):
        budgets.settle_batch("batch_1", ["alice"], 1.25)
    assert (budgets.reserved_by_batches("alice"), budgets.spent_usd("alice")) == (0, 1.25)


def test_batch_and_request_do_not_reserve_the_same_money():
    """Without a lock, both could check the remaining budget before either reserves it."""
    for _ in range(200):
        budgets, barrier, admitted = Budgets(), Barrier(2), []

        def batch(budgets=budgets, barrier=barrier, admitted=admitted):
            barrier.wait()
            admitted.append(budgets.reserve_batch("batch_1", "alice", 1) > 0)

        thread = Thread(target=batch)
        thread.start()
        barrier.wait()
        admitted.append(budgets.reserve_request("r", "alice", 1, 1) is None)
        thread.join()
        assert sorted(admitted) == [False, True]


@pytest.fixture
def append_records(tmp_path):
    """Return a function that appends records to a ledger, reads them, and returns the budgets."""
    budgets, totals = totals_of(tmp_path).budgets, totals_of(tmp_path)

    def append_records(*requests):
        for request in requests:
            append_request(tmp_path, request)
        totals.catch_up()
        return budgets

    return append_records


def test_settled_request_is_counted_once(append_records):
    budgets = append_records()
    for is_settled_before_record in (True, False):
        name = f"r{is_settled_before_record}"
        budgets.reserve_request(name, "alice", 1, 0.1)
        if is_settled_before_record:
            budgets.settle_request(name, "alice", 0.25)
        append_records(make_request_usage(name, usd=0.25))
        budgets.settle_request(name, "alice", 0.25)
    assert budgets.spent_usd("alice") == 0.5


def test_ledger_overrides_the_settled_cost(append_records):
    budgets = append_records()
    budgets.reserve_request("r", "alice", 1, 0.1)
    budgets.settle_request("r", "alice", 0)
    append_records(make_request_usage("r", usd=0.25))
    assert budgets.spent_usd("alice") == 0.25


def test_record_of_a_released_request_counts_when_it_arrives(append_records):
    budgets = append_records()
    budgets.reserve_request("r", "alice", 1, None)
    budgets.release_request("r", "alice")
    assert budgets.reserve_request("s", "alice", 1, None) is None
    append_records(make_request_usage("r", usd=0.25))
    assert budgets.spent_usd("alice") == 0.25


def test_settled_batch_is_counted_once(append_records):
    batch = replace(
        make_request_usage("batch_1", usd=0.5), usage=replace(make_request_usage("batch_1").usage, session_id="batch_1")
    )
    budgets = append_records(batch)
    budgets.settle_batch("batch_1", ["alice"], 0.5)
    assert budgets.spent_usd("alice") == 0.5


def test_new_key_with_a_reused_name_has_no_spend(append_records):
    _, before = new_key("alice", budget_usd=0.5)
    _, after = new_key("alice", budget_usd=0.5)
    budgets = append_records(make_request_usage("r", usd=0.75, account=before.account))
    assert budgets.refusal(before.account, before.budget_usd) == "spent"
    assert budgets.refusal(after.account, after.budget_usd) is None
    budgets.reserve_request("s", after.account, after.budget_usd, 0.1)
    append_records(make_request_usage("s", usd=0.25, account=after.account))
    assert (budgets.spent_usd(before.account), budgets.spent_usd(after.account)) == (0.75, 0.25)


def test_old_records_count_by_key_name(append_records):
    _, alice = new_key("alice")
    budgets = append_records(make_request_usage("r", usd=0.75))
    assert budgets.spent_usd(alice.account) == 0.75
    assert budgets.spent_usd("alice") == 0.75


# A Monday, Tuesday, Sunday, and Monday.
DAYS = [date(2026, 11, 30), date(2026, 12, 1), date(2026, 12, 6), date(2026, 12, 7)]


def request_on(day, usd, request_id="r"):
    finished_at = datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp()
    return make_request_usage(f"{request_id}{day}", account="alice 1", usd=usd, started_at=1.0, finished_at=finished_at)


@pytest.mark.parametrize(
    ("period", "left_usd"),
    [(None, [9, 8, 7, 6]), ("day", [9, 9, 9, 9]), ("week", [9, 8, 7, 9]), ("month", [9, 9, 8, 7])],
)
def test_budget_is_reset_in_each_period(period, left_usd):
    now = [DAYS[0]]
    budgets, result = Budgets(day=lambda: now[0]), []
    for now[0] in DAYS:
        budgets.on_ledger_record(request_on(now[0], 1.0))
        result.append(budgets.spending_limit("alice 1", 10.0, period) - budgets.spent_usd("alice 1"))
    assert result == left_usd


def test_settlement_without_a_record_counts_in_its_period():
    now, clock = [date(2026, 11, 30)], [0.0]
    budgets = Budgets(day=lambda: now[0], monotonic=lambda: clock[0])
    budgets.reserve_request("r", "alice 1", 10.0, 1.0)
    budgets.settle_request("r", "alice 1", 4.0)
    clock[0] = 1000.0
    budgets.expire_unconfirmed(500.0)
    left_usd = []
    for now[0] in (date(2026, 11, 30), date(2026, 12, 1)):
        left_usd.append(budgets.spending_limit("alice 1", 10.0, "month") - budgets.spent_usd("alice 1"))
    assert left_usd == [6.0, 10.0]


def test_restart_from_the_checkpoint_keeps_the_spend_by_period(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.online.totals._MIN_UNSAVED", 0)
    for day in DAYS:
        append_request(tmp_path, request_on(day, 1.0))
    before, after = Totals(tmp_path), Totals(tmp_path)
    before.catch_up()
    monkeypatch.setattr("pipelines.online.totals.RequestReader.iter_new", lambda reader: iter(()))
    after.catch_up()
    for budgets in (before.budgets, after.budgets):
        budgets._day = lambda: DAYS[-1]
        assert budgets.spending_limit("alice 1", 10.0, "week") - budgets.spent_usd("alice 1") == 9.0
