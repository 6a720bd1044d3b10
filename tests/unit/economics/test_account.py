import dataclasses
import random

import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.account import TotalsByUse, account, totals_by_period
from peagle.economics.prices import Price
from peagle.errors import PeagleError, PriceError

# 0.10 USD per vCPU-hour, to make the examples easy to follow.
PRICE = Price.fixed(usd_per_hour=0.20, device="vcpu", num_devices=2)


def make_unit_usage(session_id="a", *, busy_s, tokens, finished_at=1090.0):
    return unit_usage(
        session_id, num_rows=10, num_output_tokens=tokens, busy_s=busy_s, started_at=1030.0, finished_at=finished_at
    )


def make_session(session_id="a", *, seconds, tokens, **values):
    """`seconds` are the durations of loading, compiling, busy and idle time."""
    states = dict(zip(("load_s", "compile_s", "busy_s", "idle_s"), seconds, strict=True))
    values = {"started_at": 1000.0, "num_devices": 2} | states | values
    return engine_session(session_id, num_output_tokens=tokens, **values)


def test_account_of_the_docstring_example():
    session = make_session(seconds=(20.0, 10.0, 60.0, 10.0), tokens=1800)
    result = account([make_unit_usage(busy_s=50.0, tokens=1500)], [session], PRICE)
    assert result.device_s == TotalsByUse(load=40, compile=20, busy=100, idle=20, lost=20)
    assert result.total_usd == pytest.approx(200 / 3600 * 0.10)
    assert result.usd.lost == pytest.approx(result.total_usd / 10)
    assert result.tokens_per_usd == pytest.approx(270_000)
    assert result.usd_per_million_tokens == pytest.approx(1e6 / 270_000)
    assert result.tokens_per_busy_usd == pytest.approx(540_000)
    assert result.num_lost_tokens == 300
    assert result.output_tokens_per_s == pytest.approx(1500 / 50)
    assert result.wall_s == pytest.approx(100)
    assert result.output_tokens_per_wall_s == pytest.approx(15)


def test_work_of_the_engine_that_did_not_commit_is_lost():
    # Both engines ran the same unit, but only engine a could commit it.
    committed = make_session("a", seconds=(10.0, 0.0, 50.0, 0.0), tokens=1500)
    not_committed = make_session("b", seconds=(10.0, 0.0, 50.0, 0.0), tokens=1500)
    result = account([make_unit_usage("a", busy_s=50.0, tokens=1500)], [committed, not_committed], PRICE)
    assert result.num_output_tokens == 1500
    assert result.num_lost_tokens == 1500
    assert result.device_s.busy == result.device_s.lost == 100
    assert result.num_rows == 10


def test_uncommitted_work_of_a_killed_session_is_lost():
    killed = make_session("a", seconds=(20.0, 0.0, 40.0, 0.0), tokens=1000, ended=False)
    resumed = make_session("b", seconds=(20.0, 0.0, 30.0, 0.0), tokens=900, started_at=5000.0)
    units = [make_unit_usage("a", busy_s=25.0, tokens=700), make_unit_usage("b", busy_s=30.0, tokens=900)]
    result = account(units, [killed, resumed], PRICE)
    assert result.device_s.lost == pytest.approx(2 * 15)
    assert result.num_lost_tokens == 300
    assert (result.num_sessions, result.num_unended_sessions) == (2, 1)


def test_commit_after_the_last_heartbeat_is_charged_and_not_lost():
    # The engine was killed after the commit at 1090, before a heartbeat could record its last 20 busy seconds.
    killed = make_session(seconds=(20.0, 0.0, 30.0, 0.0), tokens=600, ended=False)
    result = account([make_unit_usage(busy_s=50.0, tokens=1500)], [killed], PRICE)
    assert result.device_s == TotalsByUse(load=40, busy=100)
    assert result.num_lost_tokens == 0
    assert result.wall_s == pytest.approx(90)


def test_wall_time_omits_pauses_and_counts_overlaps_once():
    sessions = [
        make_session("a", seconds=(0.0, 0.0, 100.0, 0.0), tokens=0),
        make_session("b", seconds=(0.0, 0.0, 20.0, 0.0), tokens=0, started_at=1010.0),
        make_session("c", seconds=(0.0, 0.0, 100.0, 0.0), tokens=0, started_at=1050.0),
        make_session("d", seconds=(0.0, 0.0, 10.0, 0.0), tokens=0, started_at=9000.0),
    ]
    random.Random(0).shuffle(sessions)
    assert account([], sessions, PRICE).wall_s == pytest.approx(160)


def test_shares_add_up_to_the_device_seconds_of_all_sessions():
    rng = random.Random(7)
    for _ in range(50):
        sessions, units = [], []
        for name in "abcd"[: rng.randint(1, 4)]:
            seconds = tuple(rng.uniform(0, 500) for _ in range(4))
            sessions.append(make_session(name, seconds=seconds, tokens=10_000, num_devices=rng.randint(1, 8)))
            parts = [rng.uniform(0, seconds[2] / 5) for _ in range(rng.randint(0, 5))]
            units += [
                make_unit_usage(name, busy_s=part, tokens=rng.randint(0, 1000), finished_at=1030.0) for part in parts
            ]
        result = account(units, sessions, PRICE)
        total_device_s = sum(session.num_devices * (session.last_seen_at - session.started_at) for session in sessions)
        assert result.device_s.total == pytest.approx(total_device_s)
        assert result.total_usd == pytest.approx(total_device_s * PRICE.usd_per_device_s)
        assert min(dataclasses.astuple(result.device_s)) >= 0
        assert result.num_output_tokens + result.num_lost_tokens == 10_000 * len(sessions)


def test_token_prices_are_none_without_output():
    result = account([], [], PRICE)
    assert result.total_usd == 0
    assert result.tokens_per_usd is result.usd_per_million_tokens is result.tokens_per_busy_usd is None
    assert result.output_tokens_per_s is result.output_tokens_per_wall_s is None
    only_loaded = account([], [make_session(seconds=(20.0, 0.0, 0.0, 0.0), tokens=0)], PRICE)
    assert only_loaded.total_usd > 0
    assert only_loaded.tokens_per_usd is None


@pytest.mark.parametrize(
    ("changes_of_sessions", "units", "error", "message"),
    [
        ([{}], [make_unit_usage("zz", busy_s=1.0, tokens=1)], PeagleError, "not in the ledger: zz"),
        ([{}, {}], [], PeagleError, "twice"),
        ([{"device": "accelerator"}], [], PriceError, r"(?s)per vcpu.*2 x accelerator.*--instance-type"),
    ],
    ids=["a unit without a session", "a session charged twice", "a price of another device"],
)
def test_contradictory_ledgers_are_refused(changes_of_sessions, units, error, message):
    sessions = [make_session(seconds=(0.0, 0.0, 1.0, 0.0), tokens=1, **changes) for changes in changes_of_sessions]
    with pytest.raises(error, match=message):
        account(units, sessions, PRICE)


def test_unit_counts_in_the_period_of_its_commit():
    """A unit takes 30 s. The first period ends after 10 s; the unit is committed in the second one, or never."""
    whole = make_session(seconds=(0.0, 0.0, 30.0, 0.0), tokens=1)
    at_midnight = dataclasses.replace(whole, last_seen_at=whole.started_at + 10, busy_s=10.0)
    assert totals_by_period([at_midnight, whole], [0.0, 30.0]) == [TotalsByUse(), TotalsByUse(busy=30.0)]
    assert totals_by_period([at_midnight, whole], [0.0, 0.0]) == [TotalsByUse(lost=10.0), TotalsByUse(lost=20.0)]
