import pytest

from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession
from peagle.runs.status import Spending

PRICE = Price.fixed(usd_per_hour=7200, device="vcpu", num_devices=2)  # a dollar for each second of a vCPU


def session(name, life_s, *, num_devices=1, ended=False):
    return EngineSession(
        session_id=name,
        engine_index=0,
        hostname="h",
        num_devices=num_devices,
        device="vcpu",
        started_at=1000.0,
        last_seen_at=1000.0 + life_s,
        load_s=life_s,
        compile_s=0.0,
        busy_s=0.0,
        idle_s=0.0,
        num_output_tokens=0,
        ended=ended,
    )


@pytest.fixture
def clock():
    return [50.0]


@pytest.fixture
def spending(clock):
    earlier = [session("killed", 10.0), session("ended", 5.0, ended=True)]
    return Spending([], earlier, PRICE, heartbeat_s=4.0, monotonic=lambda: clock[0])


def test_earlier_attempts_cost_their_heartbeats(spending, clock):
    assert spending.usd == 15.0
    clock[0] += 1000
    assert spending.observe([session("killed", 10.0), session("ended", 5.0, ended=True)]) == 15.0


def test_engine_costs_between_heartbeats(spending, clock):
    assert spending.observe([session("a", 3.0, num_devices=2)]) == 15 + 6
    clock[0] += 1.5
    assert spending.observe([session("a", 3.0, num_devices=2)]) == 15 + 9
    assert spending.observe([session("a", 4.0, num_devices=2)]) == 15 + 8


def test_silent_engine_costs_at_most_two_heartbeats(spending, clock):
    spending.observe([session("a", 3.0)])
    clock[0] += 100
    assert spending.observe([session("a", 3.0)]) == 15 + 3 + 8


def test_ended_engine_costs_nothing_more(spending, clock):
    spending.observe([session("a", 3.0, ended=True)])
    clock[0] += 100
    assert spending.observe([session("a", 3.0, ended=True)]) == 18
