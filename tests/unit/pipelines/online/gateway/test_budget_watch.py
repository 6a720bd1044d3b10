import logging
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import append_request, write_session
from peagle.economics.shared_budgets import SharedBudget, TagSpending, edit_budgets, write_tag_spending
from peagle.economics.usage import EngineSession
from pipelines.online.gateway.budget_watch import BudgetWatch, budget_status
from pipelines.online.gateway.keys import KeyRecord, KeyRing, SharedBudgets
from pipelines.online.totals import Totals
from tests.unit.pipelines.online.ledgers import make_request_usage


def key(name="alice", **limits):
    return KeyRecord(name=name, sha256="0" * 64, **limits)


@pytest.fixture
def clock(monkeypatch):
    """A clock in UTC. Tests change `now`."""
    utc_clock = SimpleNamespace(now=datetime(2026, 12, 31, 12, tzinfo=UTC))
    monkeypatch.setattr("peagle.economics.spending.datetime", SimpleNamespace(now=lambda zone: utc_clock.now))
    return utc_clock


@pytest.fixture
def spend(tmp_path, clock):
    """Return a function that records a request with a given cost that ends now."""

    def spend(usd, name="alice"):
        at = clock.now.timestamp()
        append_request(
            tmp_path, make_request_usage(f"{name}{at}{usd}", key=name, usd=usd, started_at=1.0, finished_at=at)
        )

    return spend


@pytest.fixture
def make_watch(tmp_path):
    """Return a function that makes a BudgetWatch for keys.

    The function returns the watch, and the list of (name, used share) pairs that the watch will report.
    """

    def make(*keys):
        reports = []
        ring, shared_budgets = KeyRing(None, keys), SharedBudgets(tmp_path)
        return BudgetWatch(
            ring, shared_budgets, Totals(tmp_path), on_used=lambda name, used: reports.append((name, used))
        ), reports

    return make


def logged_texts(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ray.serve"]


def test_each_level_is_logged_once_and_used_share_is_reported_at_every_check(make_watch, spend, caplog):
    watch, reports = make_watch(key(budget_usd=10), key("bob"))
    spend(4.9)
    with caplog.at_level(logging.WARNING):
        watch.check()
        assert logged_texts(caplog) == []
        spend(0.2)
        watch.check()
        watch.check()
        assert logged_texts(caplog) == ["key alice has spent 51 % of its budget of $10: $5.10 spent, $4.90 left"]
        spend(6)
        watch.check()
        watch.check()
    assert logged_texts(caplog)[1:] == ["key alice has spent 111 % of its budget of $10: $11.10 spent, $0.00 left"]
    assert reports == [("alice", used) for used in (0.49, 0.51, 0.51, 1.11, 1.11)]


def test_warnings_repeat_for_a_new_period_or_budget(tmp_path, make_watch, spend, clock, caplog):
    watch, _ = make_watch(key(budget_usd=10, budget_every="month"))
    spend(9)
    with caplog.at_level(logging.WARNING):
        watch.check()
        clock.now = datetime(2027, 1, 1, 12, tzinfo=UTC)
        watch.check()
        assert len(logged_texts(caplog)) == 1
        spend(8.5)
        watch.check()
        assert (
            logged_texts(caplog)[1] == "key alice has spent 85 % of its budget of $10 a month: $8.50 spent, $1.50 left"
        )
        watch._ring = KeyRing(None, [key(budget_usd=17, budget_every="month")])
        watch.check()
    assert logged_texts(caplog)[2].startswith("key alice has spent 50 % of its budget of $17 a month")


@pytest.fixture
def shared_budgets(tmp_path):
    """Monthly budgets: ten dollars for a tag, twenty for the endpoint."""
    with edit_budgets(tmp_path / "budgets.json") as budgets:
        for name, usd in (("team=search", 10), ("endpoint", 20)):
            budgets[name] = SharedBudget(name=name, budget_usd=usd, budget_every="month")


@pytest.mark.usefixtures("shared_budgets")
def test_tag_and_endpoint_budgets_are_watched(tmp_path, make_watch, clock, caplog):
    now = clock.now.timestamp()
    append_request(tmp_path, make_request_usage(usd=3, tags='{"team": "search"}', started_at=1.0, finished_at=now))
    write_tag_spending(
        tmp_path, TagSpending(run="r", tags='{"team": "search"}', usd_by_day={int(now // 86_400): 2.5}, at=now)
    )
    seconds_by_use = {"load_s": 600.0, "compile_s": 0.0, "busy_s": 1000.0, "idle_s": 2000.0}
    session = EngineSession(
        session_id="s", engine_index=0, hostname="h", num_devices=1, device="vcpu", started_at=now - 3600,
        last_seen_at=now, num_output_tokens=0, ended=False, usd_per_device_s=0.005, **seconds_by_use,
    )  # fmt: skip
    write_session(tmp_path, session)
    watch, reports = make_watch()
    with caplog.at_level(logging.WARNING):
        watch.check()
    assert reports == [("team=search", 0.55), ("*", 0.9)]
    assert logged_texts(caplog) == [
        "tag team=search has spent 55 % of its budget of $10 a month: $5.50 spent, $4.50 left",
        "the endpoint has spent 90 % of its budget of $20 a month: $18.00 spent, $2.00 left",
    ]


def test_budget_status_has_spent_amount_alert_level_and_reset_date(tmp_path, spend):
    totals = Totals(tmp_path)
    spend(8.0)
    totals.catch_up()
    assert budget_status(key(), totals.budgets) == {"spent_usd": 8.0}
    assert budget_status(key(budget_usd=10, budget_every="week"), totals.budgets) == {
        "spent_usd": 8.0, "left_usd": 2.0, "used": 0.8, "alert": 0.8, "reset": "2027-01-04",
    }  # fmt: skip
    assert budget_status(key("bob", budget_usd=10), totals.budgets)["alert"] is None
    assert budget_status(key(budget_usd=5), totals.budgets)["left_usd"] == 0.0


def test_watch_continues_after_a_read_error(make_watch, monkeypatch, caplog):
    watch, reports = make_watch(key(budget_usd=10))
    errors = iter([OSError("no disk"), SystemExit()])
    monkeypatch.setattr(watch, "check", lambda: (_ for _ in ()).throw(next(errors)))
    monkeypatch.setattr("pipelines.online.gateway.budget_watch.time.sleep", lambda _: None)
    with pytest.raises(SystemExit):
        watch.watch_forever()
    assert logged_texts(caplog) == ["cannot check the budgets"]
    assert reports == []
