import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest
from usage_records import engine_session

from peagle.corpus.rows import Span
from peagle.runs.liveness import Heartbeats
from peagle.runs.plan import Plan, WorkUnit
from pipelines.batch import session
from pipelines.batch.session import StartPolicy, work_by_unit

SESSION = engine_session("now", load_s=60.0, busy_s=100.0, num_output_tokens=1, ended=False)
EARLIER_SESSION = replace(SESSION, session_id="before")


class FakeRun:
    """A fake run directory. Each call of `sessions` returns the next item of `sessions_by_poll`."""

    def __init__(self, *sessions_by_poll, num_done=10, is_stopping=False):
        self.sessions_by_poll, self.num_done, self.is_stopping = list(sessions_by_poll), num_done, is_stopping

    def sessions(self):
        return self.sessions_by_poll.pop(0)

    def committed(self):
        return set(range(self.num_done))

    @property
    def stop(self):
        return SimpleNamespace(grace_s=lambda: 20.0 if self.is_stopping else None)


@pytest.fixture
def sleeps(monkeypatch):
    results = []
    # Only the module's clock is replaced, because threads of other tests use the real one.
    monkeypatch.setattr(session, "time", SimpleNamespace(**{**vars(time), "sleep": results.append}))
    monkeypatch.setattr(session, "Heartbeats", partial(Heartbeats, monotonic=lambda: sum(results)))
    return results


def wait(run, *, num_engines=1, num_units=12, work=None):
    StartPolicy(
        num_engines=num_engines, work=work or (1,) * num_units, sessions_before=frozenset({"before"}), heartbeat_s=5.0
    ).wait_until_needed(run)


def test_engine_loads_if_fewer_engines_than_the_minimum_are_running(sleeps):
    wait(FakeRun([EARLIER_SESSION]))
    wait(FakeRun([EARLIER_SESSION, SESSION]), num_engines=2)
    wait(FakeRun([EARLIER_SESSION, replace(SESSION, ended=True)]))
    assert sleeps == []


def test_engine_loads_immediately_with_much_work(sleeps):
    wait(FakeRun([EARLIER_SESSION, SESSION]), num_units=1000)
    assert sleeps == []


def test_engine_waits_with_little_work(sleeps):
    later = replace(SESSION, last_seen_at=165.0, busy_s=105.0)
    wait(FakeRun([SESSION], [later], [later]))
    assert sleeps == [15.0, 15.0]


def test_start_depends_on_remaining_work_rather_than_number_of_units(sleeps):
    with pytest.raises(IndexError):  # the policy polls until the prepared sessions are used up
        wait(FakeRun([SESSION]), work=(100,) * 10 + (1,) * 50)
    assert sleeps == [15.0]
    wait(FakeRun([SESSION]), work=(1,) * 10 + (100,))


def test_work_of_a_unit_without_an_estimate_is_its_number_of_rows():
    def unit(number, num_rows, work):
        return WorkUnit(
            unit=number, first_id=0, span=Span(path="a", format="jsonl", first_row=0, num_rows=num_rows, work=work)
        )

    plan = Plan(
        units=(unit(0, 2, 700), unit(1, 3, 0), unit(3, 1, 5)), rows_per_unit=2, schema=pa.schema([]),
        corpus_fingerprint="c",
    )  # fmt: skip
    assert work_by_unit(plan) == (700, 3, 0, 5)


def test_no_engine_loads_in_a_stopping_run(sleeps):
    run = FakeRun([], [SESSION])
    run.is_stopping = True
    with pytest.raises(IndexError):
        wait(run, num_units=1000)
    assert sleeps == [15.0, 15.0]
