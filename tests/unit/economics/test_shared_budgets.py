from datetime import UTC, datetime

import pytest
from usage_records import engine_session

from peagle.economics.shared_budgets import (
    SharedBudget,
    TagSpending,
    edit_budgets,
    engines_usd,
    read_budgets,
    read_tag_spending,
    sum_tag_spending,
    write_tag_spending,
)
from peagle.errors import ConfigError
from peagle.records import validate_record

MIDNIGHT = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
DAY = int(MIDNIGHT // 86_400)


def test_budgets_round_trip(tmp_path):
    path = tmp_path / "budgets.json"
    assert read_budgets(path) == ()
    for usd in (5.0, 7.0):
        with edit_budgets(path) as budgets:
            budgets["team=search"] = SharedBudget(name="team=search", budget_usd=usd, budget_every="week")
    assert [(budget.name, budget.budget_usd, budget.budget_every) for budget in read_budgets(path)] == [
        ("team=search", 7.0, "week")
    ]
    assert validate_record(SharedBudget, {"name": "team= search", "budget_usd": 1}, where="it").account == "team=search"
    assert validate_record(SharedBudget, {"name": "endpoint", "budget_usd": 1}, where="it").account == "*"
    for values in ({"name": "search", "budget_usd": 1}, {"name": "team=search", "budget_usd": 0}, 3):
        with pytest.raises(ConfigError):
            validate_record(SharedBudget, values, where="it")


@pytest.mark.parametrize("text", ["{}", "[{}]", "nothing"])
def test_damaged_budgets_are_an_error(tmp_path, text):
    (tmp_path / "budgets.json").write_text(text)
    with pytest.raises(ConfigError, match="budgets"):
        read_budgets(tmp_path / "budgets.json")


def test_spending_of_runs_adds_up_and_silent_runs_reserve_nothing(tmp_path, caplog):
    project_and_team, team = '{"project": "x", "team": "search"}', '{"team": "search"}'
    write_tag_spending(
        tmp_path,
        TagSpending(run="a", tags=project_and_team, usd_by_day={DAY: 1.0, DAY + 1: 2.0}, held_usd=0.5, at=1000.0),
    )
    write_tag_spending(tmp_path, TagSpending(run="b", tags=team, usd_by_day={DAY: 4.0}, held_usd=0.25, at=600.0))
    (tmp_path / "draw-c.json").write_text("{}")
    spent_by_tag, reserved = sum_tag_spending(read_tag_spending(tmp_path), now=1000.0)
    assert spent_by_tag == {"project=x": {DAY: 1.0, DAY + 1: 2.0}, "team=search": {DAY: 5.0, DAY + 1: 2.0}}
    assert reserved == {"project=x": 0.5, "team=search": 0.5}
    assert "draw-c.json" in caplog.text


def test_cost_of_engines_is_divided_by_day():
    session = engine_session(num_devices=2, started_at=MIDNIGHT - 600, busy_s=87_300.0, usd_per_device_s=0.001)
    assert engines_usd([session, session]) == pytest.approx({DAY - 1: 2.4, DAY: 345.6, DAY + 1: 1.2})
