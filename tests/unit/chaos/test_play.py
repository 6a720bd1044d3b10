"""Runs of a stand-in for `peagle generate`: it commits an empty unit every 50 ms, and goes on where it was."""

import sys
from dataclasses import dataclass

import pytest

from tests.chaos import play
from tests.chaos.audit import Audit
from tests.chaos.driver import Job
from tests.chaos.schedule import Kill

SCRIPT = """
import pathlib, sys, time
data = pathlib.Path(sys.argv[1]) / "data"
data.mkdir(parents=True, exist_ok=True)
for unit in range(len(list(data.iterdir())), int(sys.argv[2])):
    time.sleep(0.05)
    (data / f"unit-{unit:08d}.parquet").touch()
print("peagle generate: done")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn(Job):
    def command(self):
        return [sys.executable, "-I", "-S", "-c", SCRIPT, str(self.output), str(self.num_rows)]


@pytest.fixture
def play_run(tmp_path, monkeypatch):
    found = Audit(
        num_rows=0, num_lost=0, num_doubled=0, num_dead_letters=0, num_output_tokens=0, num_regenerated_tokens=0,
        regenerated_usd=0.0, total_usd=0.0, num_sessions=0, problems=(),
    )  # fmt: skip
    monkeypatch.setattr(play, "audit", lambda job: found)

    def run(num_units, *kills, limit_s=60.0):
        job = StandIn(folder=tmp_path, num_rows=num_units, is_fake=True)
        return play.Player(job, list(kills), None, limit_s=limit_s, say=lambda text: None).play()

    return run


def kill(kind, after_units):
    return Kill(kind=kind, after_units=after_units, wait_s=0.0, pick=0.0)


def test_a_killed_driver_is_started_again_until_the_run_is_done(play_run):
    played = play_run(12, kill("driver", 2), kill("driver", 3))
    assert [attempt.exit_code for attempt in played.attempts] == [-9, -9, 0]
    assert played.attempts[-1].last_words == "peagle generate: done"
    first, second = played.kills
    assert first.num_committed >= 2
    assert second.num_committed >= first.num_committed + 3
    assert played.problems == []


def test_a_kill_without_a_victim_waits_and_is_not_counted(play_run):
    played = play_run(4, kill("engine", 0), kill("driver", 0))
    assert (played.kills, [attempt.exit_code for attempt in played.attempts]) == ([], [0])


def test_a_run_that_takes_too_long_has_failed(play_run):
    played = play_run(10_000, limit_s=0.5)
    assert played.audit is None
    (problem,) = played.problems
    assert "the run hung" in problem
