import threading
import time

import pytest
from usage_records import engine_session

from peagle.economics.ledger import write_session
from peagle.economics.prices import Price
from pipelines.online import idle
from pipelines.online.config import ServeConfig
from pipelines.online.idle import IdleWatch, engines_usd, stop_when_idle

PRICE = Price.fixed(usd_per_hour=3600, device="vcpu", num_devices=2)  # 0.5 USD per vCPU-second


def write_heartbeat(folder, *, busy_s=0.0, idle_s=0.0, started_at=1000.0, session_id="s"):
    """Write and return a heartbeat of an engine that took 10 s to load."""
    heartbeat = engine_session(
        session_id, num_devices=2, started_at=started_at, load_s=10.0, busy_s=busy_s, idle_s=idle_s, ended=False
    )
    folder.mkdir(exist_ok=True)
    write_session(folder, heartbeat)
    return heartbeat


def test_working_or_starting_engine_is_not_idle(tmp_path):
    now, has_batches = [0.0], [False]
    write_heartbeat(tmp_path)
    watch = IdleWatch(tmp_path, has_batches=lambda: has_batches[0], monotonic=lambda: now[0])

    def idle_s_after(seconds):
        now[0] += seconds
        return watch.idle_s()

    assert idle_s_after(60) == 60
    write_heartbeat(tmp_path, idle_s=120)
    assert idle_s_after(60) == 120
    write_heartbeat(tmp_path, idle_s=120, busy_s=1)
    assert (idle_s_after(60), idle_s_after(60)) == (0, 60)
    write_heartbeat(tmp_path, session_id="another")  # load_s has increased
    assert (idle_s_after(60), idle_s_after(60)) == (0, 60)
    has_batches[0] = True
    assert idle_s_after(60) == 0


def test_idle_endpoint_stops_and_reports_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(idle, "_CHECK_S", 0.01)
    # Only engines that started after this process count.
    write_heartbeat(tmp_path / "ledger", idle_s=30, started_at=time.time() + 3600)
    stopped, messages = threading.Event(), []
    config = ServeConfig(state=tmp_path, idle_timeout=0.2, heartbeat_s=0.1)
    with stop_when_idle(config, PRICE, stopped, messages.append):
        assert stopped.wait(10)
        assert messages == ["no requests for 0.2 s: stopping the endpoint"]
    assert messages[1:] == ["the endpoint's engines cost $40.00"]


@pytest.mark.parametrize("idle_timeout", [None, "1h"])
def test_no_message_unless_the_endpoint_is_idle(tmp_path, idle_timeout):
    messages, config = [], ServeConfig(state=tmp_path, idle_timeout=idle_timeout)
    with stop_when_idle(config, PRICE, threading.Event(), messages.append):
        pass
    assert messages == []


def test_unreadable_ledger_does_not_stop_the_endpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(idle, "_CHECK_S", 0.01)
    (tmp_path / "ledger").mkdir()
    stopped, messages = threading.Event(), []
    config = ServeConfig(state=tmp_path, idle_timeout=0.2, heartbeat_s=0.1)
    with stop_when_idle(config, PRICE, stopped, messages.append):
        (tmp_path / "ledger" / "session-x.parquet").write_bytes(b"no table")
        assert not stopped.wait(0.5)
    assert messages
    assert all("cannot check whether the endpoint is idle" in line for line in messages)


def test_cost_counts_engines_that_started_since_a_time(tmp_path):
    write_heartbeat(tmp_path, idle_s=30)
    write_heartbeat(tmp_path, idle_s=90, started_at=2000.0, session_id="later")
    assert engines_usd(tmp_path, PRICE, since=0.0) == 40 + 100
    assert engines_usd(tmp_path, PRICE, since=1500.0) == 100


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("1.5h", 5400), (90, 90)])
def test_idle_timeout_is_a_duration(text, seconds):
    assert ServeConfig(idle_timeout=text).idle_timeout == seconds


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"idle_timeout": "soon"}, "not a duration, such as 24h"),
        ({"idle_timeout": "9s"}, "at least twice heartbeat_s"),
        ({"idle_timeout": "0s"}, "greater than 0"),
    ],
)
def test_invalid_idle_timeout_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        ServeConfig(**options)
