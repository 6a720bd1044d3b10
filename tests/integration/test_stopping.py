"""A run is stopped by Ctrl-C, SIGTERM or kill -9. Nothing is lost, and no process is left."""

import os
import signal
import time

import pyarrow.dataset as ds
import pytest

from peagle.private import temporary_folder
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import read_lease
from peagle.runs.status import StatusReader

NUM_ROWS = 40

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def arguments(write_jsonl, tmp_path):
    corpus = write_jsonl([{"prompt": f"row {n}"} for n in range(NUM_ROWS)])
    return [
        "generate", "--engine", "fake", "--fake", '{"token_s": 0.1}', "--input", corpus, "--output", tmp_path / "run",
        "--rows-per-unit", 1, "--max-num-seqs", 2, "--heartbeat-s", 0.5,
    ]  # fmt: skip


def wait_for_units(run, process, count):
    deadline = time.monotonic() + 200
    while len(run.committed()) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no unit was committed"
        time.sleep(0.05)


def ray_session_of(pid):
    """Return the session directory of the cluster that `pid` started. Ray's command lines contain it."""
    sessions = [path for path in (temporary_folder() / "ray").glob(f"session_*_{pid}") if path.is_dir()]
    assert sessions, "the run started no cluster"
    return sessions[-1]


def committed_ids(run):
    return sorted(row["id"] for row in ds.dataset(run.data, format="parquet").to_table(columns=["id"]).to_pylist())


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("signal_number", "signals_group"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGINT, False, marks=SOAK),
        pytest.param(signal.SIGTERM, True, marks=SOAK),
        pytest.param(signal.SIGTERM, False, marks=SOAK),
        pytest.param(signal.SIGKILL, False, marks=SOAK),
    ],
)
def test_stopped_run_continues_with_the_same_command(
    peagle, leftover_processes, arguments, tmp_path, signal_number, signals_group
):
    run = RunDirectory(tmp_path / "run")
    first = peagle(*arguments)
    wait_for_units(run, first, 3)
    if signals_group:  # Ctrl-C in a terminal and `timeout` signal the whole process group
        os.killpg(first.pid, signal_number)
        time.sleep(0.2)
    first.send_signal(signal_number)
    output, _ = first.communicate(timeout=120)
    if signal_number == signal.SIGKILL:
        assert first.returncode == -signal.SIGKILL
    else:
        assert first.returncode == 3, output
        assert "the same command continues the run: peagle generate --engine fake" in output
        assert f"{NUM_ROWS - len(run.committed())} of {NUM_ROWS} rows are left" in output
        assert StatusReader(run).read().state == "stopped"
    assert not leftover_processes(ray_session_of(first.pid))
    committed_before = run.committed()
    assert 3 <= len(committed_before) < NUM_ROWS

    second = peagle(*arguments, "--fake", "{}")
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    assert committed_ids(run) == [f"{n:09d}" for n in range(NUM_ROWS)]
    assert committed_before <= run.committed()
    assert not list(run.data.glob(".*"))


def test_second_driver_is_refused_and_second_ctrl_c_stops_immediately(peagle, leftover_processes, arguments, tmp_path):
    run = RunDirectory(tmp_path / "run")
    process = peagle(*arguments, "--grace-s", 300, "--fake", '{"token_s": 30}')
    deadline = time.monotonic() + 200
    while not list(run.ledger.glob("session-*.parquet")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert StatusReader(run).read().state == "running"
    other = peagle(*arguments)
    output, _ = other.communicate(timeout=120)
    assert other.returncode == 1, output
    assert f"is in use by {read_lease(run.root).describe()}" in output
    os.kill(process.pid, signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "stopped immediately" in output
    assert "continues the run: peagle generate" in output
    assert StatusReader(run).read().state == "silent"
    assert not leftover_processes(ray_session_of(process.pid))
