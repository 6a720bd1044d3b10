import json
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from usage_records import engine_session, unit_usage

from jobs import cli
from peagle.corpus.rows import Span
from peagle.economics.prices import Price
from peagle.errors import PeagleError
from peagle.runs import lease as lease_module
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import hold_lease, read_lease
from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.prepare import plan_retry
from peagle.runs.status import Spending, StatusReader
from peagle.speculation import SpeculationStats
from peagle.storage import write_atomic, write_json

SPECULATION = SpeculationStats(num_drafts=10, num_draft_tokens=30, accepted_per_position=(5, 0, 0))


def make_session(name, *, age_s=0.0, ended=False, **values):
    times = {"started_at": time.time() - age_s, "load_s": 2.0, "busy_s": 7.0, "idle_s": 1.0}
    return engine_session(name, ended=ended, **times, **values)


def commit(run, unit, *, session_id="running", num_failed_rows=0):
    usage = unit_usage(
        session_id,
        num_rows=2 - num_failed_rows,
        num_failed_rows=num_failed_rows,
        num_prompt_tokens=4,
        num_output_tokens=20,
        busy_s=2.0,
        speculation=SPECULATION,
    )
    letters = [{"id": f"{unit * 2 + n:09d}", "reason": "refused"} for n in range(num_failed_rows)]
    assert run.commit(unit, pa.table({"id": ["x"] * (2 - num_failed_rows)}), usage, letters)


@pytest.fixture
def run(root):
    """A run of four units of two rows. A killed engine committed the first unit, a running engine the second."""
    span = Span(path="a.jsonl", format="jsonl", first_row=0, num_rows=2)
    units = tuple(WorkUnit(unit=n, first_id=2 * n, span=span) for n in range(4))
    schema = pa.schema([("prompt", pa.string())])
    run = RunDirectory(root)
    price = Price.fixed(usd_per_hour=36, device="vcpu", num_devices=1)  # a cent a second
    plan = Plan(units=units, rows_per_unit=2, schema=schema, corpus_fingerprint="c")
    run.create({"price": price.to_dict()}, plan)
    run.write_session(make_session("killed", num_output_tokens=50, age_s=1000))
    run.write_session(make_session("running", num_output_tokens=56))
    commit(run, 0, session_id="killed", num_failed_rows=1)
    commit(run, 1)
    return run


def hold(run, **options):
    return hold_lease(run.root, expiry_s=30, command=["peagle", "generate"], announce=print, **options)


def test_status_labels_the_fake_engine(run):
    manifest = run.manifest() | {"config": {"engine": "fake"}}
    write_json(run.root / "run.json", manifest)
    price = "$36 per hour for 1 vCPU (stated by the user)"
    assert StatusReader(run).read().price == f"{price}; FAKE ENGINE: speed and dollars are not real"


def test_status_of_a_run_in_progress(run):
    with hold(run):
        status = StatusReader(run).read()
    assert status.state == "running"
    assert (status.num_units_done, status.num_units) == (2, 4)
    assert (status.num_rows_done, status.num_failed_rows, status.num_rows_left, status.num_rows) == (3, 1, 4, 8)
    assert status.failed_by_reason == {"refused": 1}
    assert status.price == "$36 per hour for 1 vCPU (stated by the user)"
    # The killed engine lost 50 - 20 tokens; the running engine has 56 - 20 that are not committed.
    assert (status.num_output_tokens, status.num_lost_tokens, status.num_open_tokens) == (40, 30, 36)
    assert status.tokens_per_s == 56 / 8
    assert status.acceptance_length == 1.5
    assert status.usd == pytest.approx(0.2)
    assert status.seconds_left == pytest.approx(4 * (40 / 4) / 7)  # four rows of ten tokens, at 7 tokens/s
    text = status.describe()
    for part in ("running", "2 of 4 committed", "4 left", "1 (1 refused)", "length 1.50", "$0.2", "5.7 s", "process"):
        assert part in text


@pytest.mark.parametrize(
    ("attempt_options", "run_heartbeat_s", "num_engines"),
    [({"heartbeat_s": 300}, None, 4), ({"heartbeat_s": 5}, 300, 1), ({}, 300, 4), ({}, None, 1)],
)
def test_engine_is_alive_between_heartbeats(run, attempt_options, run_heartbeat_s, num_engines):
    manifest = {**run.manifest(), **({"config": {"heartbeat_s": run_heartbeat_s}} if run_heartbeat_s else {})}
    write_atomic(run.root / "run.json", json.dumps(manifest).encode())
    for index in range(1, 4):
        run.write_session(make_session(f"s{index}", engine_index=index, age_s=75.0 * index))
    with hold(run, **attempt_options):
        assert StatusReader(run).read().num_engines == num_engines


def test_status_of_a_stopped_run(run):
    with pytest.raises(PeagleError), hold(run):
        raise PeagleError("the budget is reached\n  4 rows are left")
    status = StatusReader(run).read()
    assert (status.state, status.num_engines, status.num_open_tokens) == ("stopped", 0, 0)
    assert status.num_lost_tokens == 30 + 36
    assert status.driver.endswith("PeagleError: the budget is reached")
    assert "no engine running" in status.describe()


@pytest.mark.parametrize("silent_s", [0.0, 1000.0])
def test_remote_driver_is_alive_until_its_lease_expires(run, silent_s):
    with hold(run):
        pass
    lease = replace(read_lease(run.root), outcome=None, where="another boot", renewed_at=time.time() - silent_s)
    write_atomic(run.root / ".lease" / "1.json", lease_module._lease_to_bytes(lease))
    status = StatusReader(run).read()
    assert status.state == ("silent" if silent_s else "running")
    assert ("no heartbeat since" in status.driver) == bool(silent_s)


def test_reader_sees_new_commits_and_retries(run):
    reader = StatusReader(run)
    assert reader.read().state == "stopped"
    commit(run, 2, num_failed_rows=2)
    assert reader.read().failed_by_reason == {"refused": 3}
    plan_retry(run, run.plan())
    after = reader.read()
    assert (after.num_failed_rows, after.num_rows_left, after.num_units) == (0, 5, 6)


@pytest.mark.parametrize("is_killed", [False, True])
def test_status_before_the_report_is_written(run, monkeypatch, is_killed):
    commit(run, 2)
    commit(run, 3)
    with hold(run):
        if is_killed:
            monkeypatch.setattr(lease_module, "_start_ticks", lambda pid: 0)
        status = StatusReader(run).read()
    assert (status.state, status.num_rows_left, status.seconds_left) == ("finished", 0, None)
    assert "continues the run" not in status.describe()
    assert ("is writing the report" in status.driver) is not is_killed
    assert ("`peagle report` writes a missing report" in status.driver) is is_killed


def test_status_shows_an_interrupted_driver(run):
    with pytest.raises(KeyboardInterrupt), hold(run):
        raise KeyboardInterrupt
    assert StatusReader(run).read().driver.endswith(": interrupted")


def test_status_command_prints_json_or_text(run, capsys):
    assert cli.run(["status", str(run), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rows_left"] == 4
    assert cli.run(["status", str(run), "--watch", "0.1"]) == 0
    assert "2 of 4 committed" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--watch", "0"], ["--watch", "-1"]])
def test_watch_interval_must_be_positive(run, capsys, flags):
    assert cli.run(["status", str(run), *flags]) == 2
    assert "above 0" in capsys.readouterr().err


PRICE = Price.fixed(usd_per_hour=7200, device="vcpu", num_devices=2)  # a dollar for each second of a vCPU


def loading_session(name, load_s, *, num_devices=1, ended=False):
    return engine_session(name, num_devices=num_devices, started_at=1000.0, load_s=load_s, ended=ended)


@pytest.fixture
def spending(clock):
    """The spending of an attempt. Earlier attempts cost 15 dollars."""
    earlier = [loading_session("killed", 10.0), loading_session("ended", 5.0, ended=True)]
    return Spending([], earlier, PRICE, heartbeat_s=4.0, monotonic=clock)


def test_sessions_of_earlier_attempts_cost_nothing_more(spending, clock):
    assert spending.usd == 15.0
    clock.now += 1000
    assert spending.observe([loading_session("killed", 10.0), loading_session("ended", 5.0, ended=True)]) == 15.0


def test_cost_of_an_engine_is_extrapolated_between_heartbeats(spending, clock):
    assert spending.observe([loading_session("a", 3.0, num_devices=2)]) == 15 + 6
    clock.now += 1.5
    assert spending.observe([loading_session("a", 3.0, num_devices=2)]) == 15 + 9
    assert spending.observe([loading_session("a", 4.0, num_devices=2)]) == 15 + 8


def test_silent_engine_costs_at_most_two_more_heartbeats(spending, clock):
    spending.observe([loading_session("a", 3.0)])
    clock.now += 100
    assert spending.observe([loading_session("a", 3.0)]) == 15 + 3 + 8


def test_ended_engine_costs_nothing_more(spending, clock):
    spending.observe([loading_session("a", 3.0, ended=True)])
    clock.now += 100
    assert spending.observe([loading_session("a", 3.0, ended=True)]) == 18
