from pipelines.online.budgets import Budgets, budgets_of


def test_a_batch_holds_what_requests_under_way_leave():
    budgets = Budgets()
    budgets.hold_request("alice", 0.75)
    budgets.hold_request("bob", 5)
    assert budgets.hold_rest("batch_1", "alice", 2) == 1.25
    assert (budgets.held_by_batches("alice"), budgets.held_by_batches("bob")) == (1.25, 0)
    assert budgets.hold_rest("batch_2", "alice", 0.5) == 0
    assert (budgets.is_held_by("batch_1"), budgets.is_held_by("batch_2")) == (True, False)


def test_a_batch_that_begins_again_holds_once_and_is_charged_once():
    budgets = Budgets()
    for left_usd in (2, 1.5):
        budgets.hold_rest("batch_1", "alice", left_usd)
    assert budgets.held_by_batches("alice") == 1.5
    for _ in range(2):
        budgets.settle_batch("batch_1", "alice", 1.25)
    assert (budgets.held_by_batches("alice"), budgets.spent_by_batches("alice")) == (0, 1.25)


def test_who_asks_for_the_same_ledger_gets_the_same(tmp_path):
    assert budgets_of(tmp_path / "a") is budgets_of(tmp_path / "a")
    assert budgets_of(tmp_path / "a") is not budgets_of(tmp_path / "b")
