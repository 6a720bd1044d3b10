import dataclasses
import random

import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.account import Shares, account, shares_by_period
from peagle.economics.prices import Price
from peagle.errors import PeagleError, PriceError

# 0.10 USD per vCPU-hour, to make the examples easy to follow.
PRICE = Price.fixed(usd_per_hour=0.20, device="vcpu", num_devices=2)


def unit(session_id="a", *, busy_s, tokens, finished_at=1090.0):
    return unit_usage(
        session_id, num_rows=10, num_output_tokens=tokens, busy_s=busy_s, started_at=1030.0, finished_at=finished_at
    )


def session(session_id="a", *, states, tokens, **values):
    seconds = dict(zip(("load_s", "compile_s", "busy_s", "idle_s"), states, strict=True))
    values = {"started_at": 1000.0, "num_devices": 2} | seconds | values
    return engine_session(session_id, num_output_tokens=tokens, **values)


def test_the_worked_example_of_the_docstring():
    result = account([unit(busy_s=50.0, tokens=1500)], [session(states=(20.0, 10.0, 60.0, 10.0), tokens=1800)], PRICE)
    assert result.device_s == Shares(load=40, compile=20, busy=100, idle=20, lost=20)
    assert result.total_usd == pytest.approx(200 / 3600 * 0.10)
    assert result.usd.lost == pytest.approx(result.total_usd / 10)
    assert result.tokens_per_usd == pytest.approx(270_000)
    assert result.usd_per_million_tokens == pytest.approx(1e6 / 270_000)
    assert result.tokens_per_busy_usd == pytest.approx(540_000)
    assert result.num_lost_tokens == 300
    assert result.output_tokens_per_s == pytest.approx(1500 / 50)
    assert result.wall_s == pytest.approx(100)
    assert result.output_tokens_per_wall_s == pytest.approx(15)


def test_duplicate_work_is_lost_once():
    # Both engines ran the same unit, but only one could commit it, so only its usage exists.
    winner = session("a", states=(10.0, 0.0, 50.0, 0.0), tokens=1500)
    loser = session("b", states=(10.0, 0.0, 50.0, 0.0), tokens=1500)
    result = account([unit("a", busy_s=50.0, tokens=1500)], [winner, loser], PRICE)
    assert result.num_output_tokens == 1500
    assert result.num_lost_tokens == 1500
    assert result.device_s.busy == result.device_s.lost == 100
    assert result.num_rows == 10


def test_open_work_of_a_killed_session_is_lost():
    killed = session("a", states=(20.0, 0.0, 40.0, 0.0), tokens=1000, ended=False)
    resumed = session("b", states=(20.0, 0.0, 30.0, 0.0), tokens=900, started_at=5000.0)
    units = [unit("a", busy_s=25.0, tokens=700), unit("b", busy_s=30.0, tokens=900)]
    result = account(units, [killed, resumed], PRICE)
    assert result.device_s.lost == pytest.approx(2 * 15)
    assert result.num_lost_tokens == 300
    assert (result.num_sessions, result.num_unended_sessions) == (2, 1)


def test_a_commit_after_the_last_heartbeat_is_charged_and_not_lost():
    # Killed after the commit at 1090, before a heartbeat could record the last 20 busy seconds.
    stale = session(states=(20.0, 0.0, 30.0, 0.0), tokens=600, ended=False)
    result = account([unit(busy_s=50.0, tokens=1500)], [stale], PRICE)
    assert result.device_s == Shares(load=40, busy=100)
    assert result.num_lost_tokens == 0
    assert result.wall_s == pytest.approx(90)


def test_wall_time_without_overlap_and_pauses():
    engines = [
        session("a", states=(0.0, 0.0, 100.0, 0.0), tokens=0),
        session("b", states=(0.0, 0.0, 20.0, 0.0), tokens=0, started_at=1010.0),
        session("c", states=(0.0, 0.0, 100.0, 0.0), tokens=0, started_at=1050.0),
        session("d", states=(0.0, 0.0, 10.0, 0.0), tokens=0, started_at=9000.0),
    ]
    random.Random(0).shuffle(engines)
    assert account([], engines, PRICE).wall_s == pytest.approx(160)


def test_shares_add_up_to_the_duration_of_sessions():
    rng = random.Random(7)
    for _ in range(50):
        sessions, units = [], []
        for name in "abcd"[: rng.randint(1, 4)]:
            states = tuple(rng.uniform(0, 500) for _ in range(4))
            life = session(name, states=states, tokens=10_000, num_devices=rng.randint(1, 8))
            parts = [rng.uniform(0, states[2] / 5) for _ in range(rng.randint(0, 5))]
            units += [unit(name, busy_s=part, tokens=rng.randint(0, 1000), finished_at=1030.0) for part in parts]
            sessions.append(life)
        result = account(units, sessions, PRICE)
        total_device_s = sum(life.num_devices * (life.last_seen_at - life.started_at) for life in sessions)
        assert result.device_s.total == pytest.approx(total_device_s)
        assert result.total_usd == pytest.approx(total_device_s * PRICE.usd_per_device_s)
        assert min(dataclasses.astuple(result.device_s)) >= 0
        assert result.num_output_tokens + result.num_lost_tokens == 10_000 * len(sessions)


def test_an_account_without_output():
    result = account([], [], PRICE)
    assert result.total_usd == 0
    assert result.tokens_per_usd is result.usd_per_million_tokens is result.tokens_per_busy_usd is None
    assert result.output_tokens_per_s is result.output_tokens_per_wall_s is None
    only_loaded = account([], [session(states=(20.0, 0.0, 0.0, 0.0), tokens=0)], PRICE)
    assert only_loaded.total_usd > 0
    assert only_loaded.tokens_per_usd is None


@pytest.mark.parametrize(
    ("sessions", "units", "error", "message"),
    [
        ([{}], [unit("zz", busy_s=1.0, tokens=1)], PeagleError, "not in the ledger: zz"),
        ([{}, {}], [], PeagleError, "twice"),
        ([{"device": "accelerator"}], [], PriceError, r"(?s)per vcpu.*2 x accelerator.*--instance-type"),
    ],
    ids=["a unit without a session", "a session charged twice", "a price of another device"],
)
def test_contradictory_ledgers_are_refused(sessions, units, error, message):
    with pytest.raises(error, match=message):
        account(units, [session(states=(0.0, 0.0, 1.0, 0.0), tokens=1, **values) for values in sessions], PRICE)


def test_the_worked_example_of_periods():
    """A day ends 10 s into a unit that takes 30 s and is committed the day after."""
    whole = session(states=(0.0, 0.0, 30.0, 0.0), tokens=1)
    at_midnight = dataclasses.replace(whole, last_seen_at=whole.started_at + 10, busy_s=10.0)
    assert shares_by_period([at_midnight, whole], [0.0, 30.0]) == [Shares(), Shares(busy=30.0)]
    assert shares_by_period([at_midnight, whole], [0.0, 0.0]) == [Shares(lost=10.0), Shares(lost=20.0)]
