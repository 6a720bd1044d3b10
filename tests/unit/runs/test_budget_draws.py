from datetime import UTC, date, datetime

import pytest

from peagle.economics.ledger import append_request
from peagle.economics.shared_budgets import (
    SharedBudget,
    TagSpending,
    edit_budgets,
    read_tag_spending,
    write_tag_spending,
)
from peagle.errors import ConfigError
from peagle.runs.budget_draws import TagBudgets
from tests.unit.pipelines.online.ledgers import make_request_usage

SEARCH_TAGS = '{"team": "search"}'
DAYS = [date(2026, 11, 30), date(2026, 12, 1)]
DAY_NUMBERS = [(day - date(1970, 1, 1)).days for day in DAYS]


@pytest.fixture
def ledger(tmp_path):
    """A ledger with a budget of $10 a month for the tag team=search."""
    path = tmp_path / "ledger"
    path.mkdir()
    with edit_budgets(path / "budgets.json") as budgets:
        budgets["team=search"] = SharedBudget(name="team=search", budget_usd=10, budget_every="month")
    return path


@pytest.fixture
def today():
    """A list of one date, which a test replaces to change the day."""
    return [DAYS[0]]


@pytest.fixture
def make_run_budget(ledger, today, clock):
    return lambda run="r", tags=SEARCH_TAGS: TagBudgets(ledger, run, tags, monotonic=clock, day=lambda: today[0])


def record_request(ledger, usd, tags=SEARCH_TAGS, day=DAYS[0]):
    """Write a request that cost `usd` dollars to the ledger."""
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp()
    append_request(ledger, make_request_usage(f"{usd}{noon}", usd=usd, tags=tags, started_at=1.0, finished_at=noon))


def test_requests_and_runs_share_a_tag_budget(ledger, make_run_budget, clock):
    budget, budget_of_other_run = make_run_budget(), make_run_budget("other")
    assert budget.reached(1.0, 0.5) is None
    assert budget_of_other_run.reached(4.0, 0.5) is None
    record_request(ledger, 3.0)
    record_request(ledger, 50.0, tags='{"team": "ads"}')
    record_request(ledger, 50.0, day=date(2026, 10, 31))
    clock.now += 5
    # 10 - 3 (the request) - 1.5 - 4 (the two runs) - 0.5 (to shut the other run down) = 1 dollar is left.
    assert budget.reached(1.5, 0.5) is None
    assert budget.reached(1.5, 1.0) == (
        "the budget of $10 a month for team=search is reached: $1.00 left, and shutting the run down may cost $1.00; "
        "the budget resets on 2026-12-01"
    )


def test_ledger_is_read_again_after_five_seconds(ledger, make_run_budget, clock):
    budget = make_run_budget()
    assert budget.reached(1.0, 0.5) is None
    record_request(ledger, 20.0)
    assert budget.reached(1.0, 0.5) is None
    clock.now += 5
    assert "$0 left" in budget.reached(1.0, 0.5)


def test_cost_of_each_attempt_counts_on_its_day(ledger, make_run_budget, today):
    first = make_run_budget()
    first.reached(2.0, 0.5)
    first.end(3.0)
    today[0] = DAYS[1]
    second = make_run_budget()
    assert second.reached(3.5, 0.5) is None
    second.end(12.0)
    (spending,) = read_tag_spending(ledger)
    assert (dict(spending.usd_by_day), spending.held_usd) == ({DAY_NUMBERS[0]: 3.0, DAY_NUMBERS[1]: 9.0}, 0.0)
    assert "is reached: $1.00 left" in make_run_budget().reached(12.0, 1.0), "the first $3 were spent last month"


def test_reservation_of_a_killed_run_expires(ledger, make_run_budget):
    write_tag_spending(
        ledger, TagSpending(run="killed", tags=SEARCH_TAGS, usd_by_day={DAY_NUMBERS[0]: 1.0}, held_usd=100.0, at=1.0)
    )
    assert make_run_budget().reached(1.0, 0.5) is None


def test_budget_set_later_counts_earlier_cost(ledger, make_run_budget, clock):
    budget = make_run_budget(tags='{"team": "ads"}')
    assert budget.reached(5.0, 0.5) is None
    with edit_budgets(ledger / "budgets.json") as budgets:
        budgets["team=ads"] = SharedBudget(name="team=ads", budget_usd=4)
    clock.now += 5
    assert budget.reached(5.0, 0.5).startswith("the budget of $4 for team=ads is reached")


def test_missing_ledger_is_an_error_but_later_failures_are_logged(ledger, make_run_budget, clock, caplog):
    with pytest.raises(ConfigError, match="no ledger found"):
        TagBudgets(ledger / "no", "r", SEARCH_TAGS)
    budget = make_run_budget()
    budget.reached(1.0, 0.5)
    (ledger / "budgets.json").write_text("{")
    clock.now += 5
    assert budget.reached(9.6, 0.5) is not None, "the last valid budgets apply"
    assert "cannot read the budgets" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        make_run_budget().reached(1.0, 0.5)
