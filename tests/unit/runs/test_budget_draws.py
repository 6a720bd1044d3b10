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
from tests.unit.pipelines.online.ledgers import a_request

SEARCH = '{"team": "search"}'
DAYS = [date(2026, 11, 30), date(2026, 12, 1)]
NUMBERS = [(day - date(1970, 1, 1)).days for day in DAYS]


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
    return [DAYS[0]]


@pytest.fixture
def make_draw(ledger, today, clock):
    return lambda run="r", tags=SEARCH: TagBudgets(ledger, run, tags, monotonic=clock, day=lambda: today[0])


def spend(ledger, usd, tags=SEARCH, day=DAYS[0]):
    at = datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp()
    append_request(ledger, a_request(f"{usd}{at}", usd=usd, tags=tags, started_at=1.0, finished_at=at))


def test_requests_and_runs_share_a_tag_budget(ledger, make_draw, clock):
    draw, other = make_draw(), make_draw("other")
    assert draw.reached(1.0, 0.5) is None
    assert other.reached(4.0, 0.5) is None
    spend(ledger, 3.0)
    spend(ledger, 50.0, tags='{"team": "ads"}')
    spend(ledger, 50.0, day=date(2026, 10, 31))
    clock.now += 5
    assert draw.reached(1.5, 0.5) is None, "one dollar is left after the $0.5 that shutting down the other run may cost"
    assert draw.reached(1.5, 1.0) == (
        "the budget of $10 a month of team=search is reached: $1.00 left, and shutting the run down may cost $1.00; "
        "it resets on 2026-12-01"
    )


def test_ledger_is_polled_every_few_seconds(ledger, make_draw, clock):
    draw = make_draw()
    assert draw.reached(1.0, 0.5) is None
    spend(ledger, 20.0)
    assert draw.reached(1.0, 0.5) is None
    clock.now += 5
    assert "$0 left" in draw.reached(1.0, 0.5)


def test_cost_of_attempts_counts_once_per_day(ledger, make_draw, today):
    first = make_draw()
    first.reached(2.0, 0.5)
    first.end(3.0)
    today[0] = DAYS[1]
    second = make_draw()
    assert second.reached(3.5, 0.5) is None
    second.end(12.0)
    (draw,) = read_tag_spending(ledger)
    assert (dict(draw.usd_by_day), draw.held_usd) == ({NUMBERS[0]: 3.0, NUMBERS[1]: 9.0}, 0.0)
    assert "is reached: $1.00 left" in make_draw().reached(12.0, 1.0), "the first $3 were spent last month"


def test_reservation_of_a_killed_run_expires(ledger, make_draw):
    write_tag_spending(
        ledger, TagSpending(run="killed", tags=SEARCH, usd_by_day={NUMBERS[0]: 1.0}, held_usd=100.0, at=1.0)
    )
    assert make_draw().reached(1.0, 0.5) is None


def test_budget_set_later_counts_earlier_cost(ledger, make_draw, clock):
    draw = make_draw(tags='{"team": "ads"}')
    assert draw.reached(5.0, 0.5) is None
    with edit_budgets(ledger / "budgets.json") as budgets:
        budgets["team=ads"] = SharedBudget(name="team=ads", budget_usd=4)
    clock.now += 5
    assert draw.reached(5.0, 0.5).startswith("the budget of $4 of team=ads is reached")


def test_missing_ledger_is_an_error_but_later_failures_are_logged(ledger, make_draw, clock, caplog):
    with pytest.raises(ConfigError, match="no ledger found"):
        TagBudgets(ledger / "no", "r", SEARCH)
    draw = make_draw()
    draw.reached(1.0, 0.5)
    (ledger / "budgets.json").write_text("{")
    clock.now += 5
    assert draw.reached(9.6, 0.5) is not None, "the last valid budgets apply"
    assert "cannot read the budgets" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        make_draw().reached(1.0, 0.5)
