from dataclasses import replace
from datetime import UTC, date, datetime
from threading import Barrier, Thread

import pytest

from peagle.economics.ledger import append_request
from pipelines.online.budgets import Budgets
from pipelines.online.gateway.keys import new_key
from pipelines.online.totals import Totals, totals_of
from tests.unit.pipelines.online.ledgers import a_request


def test_a_batch_holds_what_requests_under_way_leave():
    budgets = Budgets()
    budgets.reserve_request("1", "alice", None, 0.75)
    budgets.reserve_request("2", "bob", None, 5)
    assert budgets.reserve_batch("batch_1", "alice", 2) == 1.25
    assert (budgets.reserved_by_batches("alice"), budgets.reserved_by_batches("bob")) == (1.25, 0)
    assert budgets.reserve_batch("batch_2", "alice", 0.5) == 0
    assert (budgets.reserved_by_batch("batch_1", "alice"), budgets.reserved_by_batch("batch_2", "alice")) == (1.25, 0)


def test_a_batch_holds_what_it_wants_and_then_more_as_long_as_there_is_some():
    budgets = Budgets()
    assert budgets.reserve_batch("batch_1", "alice", 2, 0.5) == 0.5
    assert budgets.reserve_request("1", "alice", 2, 1) is None
    assert budgets.reserve_request("2", "alice", 2, 0.6) == "reserved by requests"
    assert budgets.reserve_batch("batch_1", "alice", 2, 5) == 1
    assert budgets.reserve_batch("batch_2", "alice", 2, 5) == 0, "a request and a batch hold all"
    assert (budgets.reserved_by_batch("batch_1", "alice"), budgets.reserved_by_batches("alice")) == (1, 1)


def test_a_batch_that_begins_again_holds_once_and_is_charged_once():
    budgets = Budgets()
    for left_usd in (2, 1.5):
        budgets.reserve_batch("batch_1", "alice", left_usd)
    assert budgets.reserved_by_batches("alice") == 1.5
    for _ in range(2):
        budgets.settle_batch("batch_1", ["alice"], 1.25)
    assert (budgets.reserved_by_batches("alice"), budgets.spent_usd("alice")) == (0, 1.25)


def test_who_asks_for_the_same_ledger_gets_the_same(tmp_path):
    assert totals_of(tmp_path / "a").budgets is totals_of(tmp_path / "a").budgets
    assert totals_of(tmp_path / "a").budgets is not totals_of(tmp_path / "b").budgets


def test_a_batch_and_a_request_never_both_get_what_is_left():
    """The attack: both look at what is left, and then both hold it."""
    for _ in range(200):
        budgets, barrier, got = Budgets(), Barrier(2), []

        def batch(budgets=budgets, barrier=barrier, got=got):
            barrier.wait()
            got.append(budgets.reserve_batch("batch_1", "alice", 1) > 0)

        thread = Thread(target=batch)
        thread.start()
        barrier.wait()
        got.append(budgets.reserve_request("r", "alice", 1, 1) is None)
        thread.join()
        assert sorted(got) == [False, True]


@pytest.fixture
def read(tmp_path):
    """Append lines to a ledger and read them; the budgets that follow it."""
    budgets, totals = totals_of(tmp_path).budgets, totals_of(tmp_path)

    def append_and_read(*requests):
        for one in requests:
            append_request(tmp_path, one)
        totals.catch_up()
        return budgets

    return append_and_read


def test_what_an_answer_and_the_ledger_say_of_a_request_is_spent_once(read):
    budgets = read()
    for is_answered_first in (True, False):
        name = f"r{is_answered_first}"
        budgets.reserve_request(name, "alice", 1, 0.1)
        if is_answered_first:
            budgets.settle_request(name, "alice", 0.25)
        read(a_request(name, usd=0.25))
        budgets.settle_request(name, "alice", 0.25)
    assert budgets.spent_usd("alice") == 0.5


def test_what_the_ledger_says_counts_where_an_answer_said_something_else(read):
    budgets = read()
    budgets.reserve_request("r", "alice", 1, 0.1)
    budgets.settle_request("r", "alice", 0)
    read(a_request("r", usd=0.25))
    assert budgets.spent_usd("alice") == 0.25


def test_what_another_ingress_let_in_is_spent_when_its_engine_writes_it(read):
    """The attack: what was under way when an ingress died was written after the next one had read the ledger."""
    budgets = read(a_request("before", usd=0.25))
    read(a_request("late", usd=0.5))
    assert budgets.spent_usd("alice") == 0.75


def test_what_was_let_go_is_spent_where_the_ledger_names_it_after_all(read):
    budgets = read()
    budgets.reserve_request("r", "alice", 1, None)
    budgets.release_request("r", "alice")
    assert budgets.reserve_request("s", "alice", 1, None) is None
    read(a_request("r", usd=0.25))
    assert budgets.spent_usd("alice") == 0.25


def test_a_batch_of_the_ledger_and_of_the_scheduler_is_spent_once(read):
    batch = replace(a_request("batch_1", usd=0.5), usage=replace(a_request("batch_1").usage, session_id="batch_1"))
    budgets = read(batch)
    budgets.settle_batch("batch_1", ["alice"], 0.5)
    assert budgets.spent_usd("alice") == 0.5


def test_a_request_that_is_long_forgotten_stays_spent(clock):
    budgets = Budgets(monotonic=clock)
    budgets.reserve_request("r", "alice", 1, 0.1)
    budgets.settle_request("r", "alice", 0.25)
    budgets.expire_unconfirmed(clock.now + 1)
    assert (budgets.spent_usd("alice"), budgets._unconfirmed) == (0.25, {})


def test_a_key_under_the_name_of_a_revoked_one_has_spent_nothing(read):
    _, before = new_key("alice", budget_usd=0.5)
    _, after = new_key("alice", budget_usd=0.5)
    budgets = read(a_request("r", usd=0.75, account=before.account))
    assert budgets.refusal(before.account, before.budget_usd) == "spent"
    assert budgets.refusal(after.account, after.budget_usd) is None
    budgets.reserve_request("s", after.account, after.budget_usd, 0.1)
    read(a_request("s", usd=0.25, account=after.account))
    assert (budgets.spent_usd(before.account), budgets.spent_usd(after.account)) == (0.75, 0.25)


def test_records_without_an_account_count_for_the_key_of_their_name(read):
    _, alice = new_key("alice")
    budgets = read(a_request("r", usd=0.75))
    assert budgets.spent_usd(alice.account) == 0.75
    assert budgets.spent_usd("alice") == 0.75


DAYS = [date(2026, 11, 30), date(2026, 12, 1), date(2026, 12, 6), date(2026, 12, 7)]  # Monday to Monday


def ended(day, usd, request_id="r"):
    at = datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp()
    return a_request(f"{request_id}{day}", account="alice 1", usd=usd, started_at=1.0, finished_at=at)


@pytest.mark.parametrize(
    ("every", "left"), [(None, [9, 8, 7, 6]), ("day", [9, 9, 9, 9]), ("week", [9, 8, 7, 9]), ("month", [9, 9, 8, 7])]
)
def test_a_budget_is_for_all_time_or_begins_anew_with_each_period(every, left):
    now = [DAYS[0]]
    budgets, found = Budgets(day=lambda: now[0]), []
    for now[0] in DAYS:
        budgets.on_ledger_record(ended(now[0], 1.0))
        found.append(budgets.spending_limit("alice 1", 10.0, every) - budgets.spent_usd("alice 1"))
    assert found == left


def test_a_key_whose_budget_is_spent_gets_in_again_in_the_next_period_and_no_sooner():
    now = [date(2026, 11, 30)]
    budgets = Budgets(day=lambda: now[0])
    budgets.on_ledger_record(ended(now[0], 12.0))
    refused = budgets.refusal("alice 1", budgets.spending_limit("alice 1", 10.0, "month"))
    now[0] = date(2026, 12, 1)
    allowed_usd = budgets.spending_limit("alice 1", 10.0, "month")
    assert (refused, budgets.refusal("alice 1", allowed_usd)) == ("spent", None)
    assert budgets.reserve_batch("batch_1", "alice 1", allowed_usd - budgets.spent_usd("alice 1")) == 10.0


def test_what_an_answer_told_and_the_ledger_never_said_counts_in_its_own_period_alone():
    now, clock = [date(2026, 11, 30)], [0.0]
    budgets = Budgets(day=lambda: now[0], monotonic=lambda: clock[0])
    budgets.reserve_request("r", "alice 1", 10.0, 1.0)
    budgets.settle_request("r", "alice 1", 4.0)
    clock[0] = 1000.0
    budgets.expire_unconfirmed(500.0)
    left = []
    for now[0] in (date(2026, 11, 30), date(2026, 12, 1)):
        left.append(budgets.spending_limit("alice 1", 10.0, "month") - budgets.spent_usd("alice 1"))
    assert left == [6.0, 10.0]


def test_a_restart_knows_what_was_spent_before_the_period(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.online.totals._MIN_UNSAVED", 0)
    for day in DAYS:
        append_request(tmp_path, ended(day, 1.0))
    before, after = Totals(tmp_path), Totals(tmp_path)
    before.catch_up()
    monkeypatch.setattr("pipelines.online.totals.RequestReader.each", lambda reader: iter(()))
    after.catch_up()
    for budgets in (before.budgets, after.budgets):
        budgets._day = lambda: DAYS[-1]
        assert budgets.spending_limit("alice 1", 10.0, "week") - budgets.spent_usd("alice 1") == 9.0
