from collections import defaultdict
from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from usage_records import engine_session, unit_usage

from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.spending import (
    DAY_S,
    NODES,
    Days,
    Ledger,
    Spend,
    SpendingGroup,
    charges,
    day_number,
    day_of,
    node_charges,
)
from peagle.economics.statement import statement
from peagle.economics.usage import Work, interpolate_session
from tests.unit.economics.month import SERVING

PRICE = Price.fixed(usd_per_hour=72, device="vcpu", num_devices=2)  # 0.01 USD per device-second
ALL_DAYS = Days()
KINDS = ("attributed_usd", "loading_usd", "idle_usd", "lost_usd")


def make_session(session_id="s", **values):
    defaults = {"num_devices": 2, "model": "m", "drafter": "head", "instance_type": "i", "usd_per_device_s": 0.01}
    return engine_session(session_id, **defaults | values)


def make_ledger(sessions, work, session_at=lambda session, moment: interpolate_session(moment, None, session)):
    return Ledger(run="r", sessions=sessions, work=work, session_at=session_at)


def total_spend(ledger, days=ALL_DAYS):
    return sum((charge.spend for charge in charges(ledger, days)), Spend())


@st.composite
def random_sessions_and_units(draw):
    """Draw sessions over several days, and the usage of their committed units."""
    sessions, units = [], []
    for number in range(draw(st.integers(1, 4))):
        seconds = st.floats(0, 2 * DAY_S, allow_subnormal=False)
        states = {name: draw(seconds) for name in ("load_s", "compile_s", "busy_s", "idle_s")}
        engine = make_session(f"s{number}", started_at=draw(st.floats(0, 3 * DAY_S)), **states)
        sessions.append(replace(engine, last_seen_at=engine.started_at + sum(states.values())))
        for _ in range(draw(st.integers(0, 4))):
            finished_at = engine.started_at + draw(st.floats(0, 1)) * (engine.last_seen_at - engine.started_at)
            busy_s = draw(st.floats(0, 1)) * engine.busy_s / draw(st.integers(1, 4))
            times = {"busy_s": busy_s, "started_at": 0.0, "finished_at": finished_at}
            units.append(unit_usage(engine.session_id, num_output_tokens=draw(st.integers(0, 99)), **times))
    return sessions, units


def make_run_ledger(sessions, units):
    work = {}
    for index, unit in enumerate(units):
        group = SpendingGroup(day_of(unit.finished_at), unit.session_id, f"key{index % 3}", "m", "head", "{}")
        work[group] = work.get(group, Work()) + Work.of(unit, unit.busy_s * 2 * 0.01)  # two devices
    return make_ledger(sessions, work)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sessions_and_units=random_sessions_and_units())
def test_charges_add_up_to_the_account(sessions_and_units):
    sessions, units = sessions_and_units
    total, run_account = total_spend(make_run_ledger(sessions, units)), account(units, sessions, PRICE)
    assert total.attributed_usd == pytest.approx(run_account.usd.busy, abs=1e-6)
    assert total.loading_usd == pytest.approx(run_account.usd.load + run_account.usd.compile, abs=1e-6)
    assert total.idle_usd == pytest.approx(run_account.usd.idle, abs=1e-6)
    assert total.lost_usd == pytest.approx(run_account.usd.lost, abs=1e-6)
    assert total.num_output_tokens == run_account.num_output_tokens


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sessions_and_units=random_sessions_and_units(), last_days=st.sets(st.integers(-1, 13), max_size=4))
def test_spending_of_consecutive_periods_adds_up_to_the_total(sessions_and_units, last_days):
    run_ledger = make_run_ledger(*sessions_and_units)
    ends = sorted(last_days)
    periods = [Days(*pair) for pair in zip([None, *(end + 1 for end in ends)], [*ends, None], strict=True)]
    parts, whole = [total_spend(run_ledger, days) for days in periods], total_spend(run_ledger)
    for name in KINDS:
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name), abs=1e-6)
    assert all(getattr(charge.spend, name) >= -1e-9 for charge in charges(run_ledger, Days()) for name in KINDS)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(sessions_and_units=random_sessions_and_units(), random=st.randoms(use_true_random=False))
def test_totals_do_not_depend_on_the_order_or_grouping_of_charges(sessions_and_units, random):
    sessions, units = sessions_and_units
    run_ledger = make_run_ledger(sessions, units)
    run_charges = list(charges(run_ledger, Days()))
    by_day_and_key = statement(run_charges, ("day", "key"), Days())
    random.shuffle(run_charges)
    shuffled = statement(run_charges, ("day", "key"), Days())
    for row, other in zip(by_day_and_key["rows"], shuffled["rows"], strict=True):
        assert (row["day"], row["key"], row["num_output_tokens"]) == (
            other["day"], other["key"], other["num_output_tokens"],
        )  # fmt: skip
        for kind, usd in row["usd"].items():
            assert usd == pytest.approx(other["usd"][kind], abs=2.1e-9)  # both are rounded to nanodollars
    for result in (by_day_and_key, shuffled, statement(run_charges, (), Days())):
        nanodollars_by_kind = defaultdict(int)
        for row in result["rows"]:
            for kind, usd in row["usd"].items():
                nanodollars_by_kind[kind] += round(usd * 1e9)
        assert dict(nanodollars_by_kind) == {
            kind: round(usd * 1e9) for kind, usd in result["total"]["usd"].items() if nanodollars_by_kind
        }
        total = result["total"]["usd"]
        parts = sum(round(total[kind] * 1e9) for kind in ("attributed", "overhead", "lost"))
        assert parts == round(total["total"] * 1e9)
        whole = total_spend(run_ledger)
        assert total["total"] == pytest.approx(sum(getattr(whole, name) for name in KINDS), abs=1e-6)


def test_work_counts_on_its_commit_day():
    """A unit that takes 30 s is committed 20 s after midnight."""
    engine = make_session(started_at=DAY_S - 10.0, busy_s=30.0)
    committed = {SpendingGroup(1, "s", "k", "m", None, "{}"): Work(num_requests=1, usd=0.6)}
    day_charges = list(charges(make_ledger([engine], committed), Days()))
    assert [(charge.day, charge.spend.attributed_usd) for charge in day_charges] == [(1, 0.6)]
    lost = list(charges(make_ledger([engine], {}), Days()))
    assert sum(charge.spend.lost_usd for charge in lost) == pytest.approx(0.6)


def test_compile_time_over_midnight_is_counted_once():
    """At midnight, the engine is not ready, so all its 100 s count as load. Later, 60 s of them count as compile."""
    engine = make_session(started_at=DAY_S - 100.0, load_s=40.0, compile_s=110.0)
    loading = replace(engine, load_s=100.0, compile_s=0.0, last_seen_at=float(DAY_S))
    day_charges = list(charges(make_ledger([engine], {}, session_at=lambda *_: loading), Days()))
    assert [charge.day for charge in day_charges] == [0, 1]
    assert [charge.spend.loading_usd for charge in day_charges] == pytest.approx([2.0, 1.0])


def test_overhead_has_no_key():
    work = {
        SpendingGroup(0, "s", "alice", "m", "head", "{}"): Work(usd=1.0),
        SpendingGroup(0, "batch_1", "bob", "m", None, "{}"): Work(usd=3),
    }
    engine = make_session(load_s=50.0, busy_s=60.0)
    rows = statement(charges(make_ledger([engine], work), Days()), ("key",), Days())["rows"]
    assert [(row["key"], row["usd"]["attributed"], row["usd"]["overhead"], row["usd"]["lost"]) for row in rows] == [
        ("", 0.0, pytest.approx(1.0), pytest.approx(0.2)), ("alice", 1.0, 0.0, 0.0), ("bob", 3.0, 0.0, 0.0),
    ]  # fmt: skip


def test_cost_of_engines_without_a_price_is_unknown():
    work = {SpendingGroup(0, "s", "alice", "m", "head", "{}"): Work(usd=1.0, num_output_tokens=5)}
    engine = make_session(busy_s=60.0, usd_per_device_s=0.0)
    result = statement(charges(make_ledger([engine], work), Days()), ("key",), Days())
    assert [row["usd"]["total"] for row in result["rows"]] == [None, 1.0]
    total = result["total"]
    assert (total["usd"]["attributed"], total["usd"]["overhead"], total["usd"]["total"]) == (1.0, None, None)
    assert total["usd_per_million_tokens"] is None
    assert "no price" in result["notes"][0]


def test_spot_charges_have_the_on_demand_cost_of_work_that_is_not_lost():
    """Each of 35 s costs 0.02 USD. 5 s are lost; the other 30 s would cost 0.06 USD each on demand."""
    spot = make_session(load_s=10.0, busy_s=20.0, idle_s=5.0, market="spot", on_demand_usd_per_device_s=0.03)
    work = {SpendingGroup(0, "s", "alice", "m", None, "{}"): Work(num_requests=1, busy_s=15.0, usd=0.30)}
    savings = total_spend(make_ledger([spot], work)).savings
    assert (savings.spot_usd, savings.on_demand_usd) == (pytest.approx(0.70), pytest.approx(1.80))
    unpriced = total_spend(make_ledger([replace(spot, on_demand_usd_per_device_s=0.0)], work)).savings
    assert unpriced.unpriced_spot_usd == pytest.approx(0.70)


MIDNIGHT = day_number(date(2026, 11, 4)) * DAY_S


def idle_engine(begin_h, end_h):  # hours after MIDNIGHT
    return replace(
        SERVING, started_at=MIDNIGHT + 3600.0 * begin_h, last_seen_at=MIDNIGHT + 3600.0 * end_h, load_s=0.0, busy_s=0.0,
        idle_s=3600.0 * (end_h - begin_h),
    )  # fmt: skip


def test_nodes_cost_money_while_any_engine_runs():
    engines = [idle_engine(1, 5), idle_engine(-2, 2), idle_engine(3, 4), idle_engine(8, 9)]
    costs = list(node_charges(engines, Days(), 0.5))
    assert sum(cost.spend.idle_usd for cost in costs) == pytest.approx(0.5 * (7 + 1))  # hours -2 to 5, 8 to 9
    assert {(cost.run, cost.key) for cost in costs} == {(NODES, "")}


def test_cost_of_nodes_is_divided_by_day():
    november_4 = MIDNIGHT // DAY_S
    for day, hours in ((november_4 - 1, 2), (november_4, 24), (november_4 + 1, 3)):
        costs = list(node_charges([idle_engine(-2, 27)], Days(day, day), 0.5))
        assert [(cost.day, cost.spend.idle_usd) for cost in costs] == [(day, pytest.approx(0.5 * hours))]


def test_nodes_cost_nothing_without_engines():
    assert list(node_charges([], Days(), 0.5)) == []
    assert list(node_charges([idle_engine(1, 1)], Days(), 0.5)) == []
