import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from peagle.errors import EngineError
from pipelines.cluster import vitals
from pipelines.cluster.vitals import Part, RayDied, Vitals

ROOT = Path(__file__).parents[4]


@pytest.fixture
def part_and_kill():
    """A Ray process, and a function that kills it."""
    process = subprocess.Popen(["sleep", "60"])
    is_alive = vitals._process_check(psutil.Process(process.pid))
    yield Part(name="raylet (process 7)", is_alive=is_alive, log="/logs"), process.kill
    process.kill()
    process.wait()


@pytest.fixture
def watch():
    """Return a function that watches a process until the test ends.

    A longer watch would kill the test's own process 15 s after the watched process died.
    """
    watches = []

    def start(part, if_lost=""):
        watches.append(Vitals([part], if_lost))
        return watches[-1].watching()

    yield start
    for ray_vitals in watches:
        ray_vitals._ended.set()
        ray_vitals._thread.join(5)
        assert not ray_vitals._thread.is_alive()


def test_dead_part_raises_in_main_thread(part_and_kill, watch):
    watched, kill = part_and_kill
    threading.Timer(0.3, kill).start()
    started_at = time.monotonic()
    with (
        pytest.raises(RayDied, match=r"Ray's raylet \(process 7\) died") as error,
        watch(watched, "Units are saved"),
    ):
        threading.Event().wait(30)
    assert time.monotonic() - started_at < 5
    assert error.value.hint.startswith("Units are saved. ")
    assert "the log is /logs" in error.value.hint
    assert error.value.exit_code == EngineError.exit_code == 1


def test_error_after_a_ray_process_died_becomes_ray_died(part_and_kill, watch):
    watched, kill = part_and_kill

    def fail():
        kill()
        time.sleep(0.1)
        raise RuntimeError("the task's local raylet died")

    with pytest.raises(RayDied, match=r"Ray's raylet \(process 7\) died"), watch(watched):
        fail()


def test_other_errors_pass_through(part_and_kill, watch):
    watched, kill = part_and_kill
    with pytest.raises(ValueError, match="unrelated"), watch(watched):
        raise ValueError("unrelated")
    kill()
    time.sleep(1)


def test_blocked_main_thread_is_killed(tmp_path):
    """After Ray has died, a call to Ray might block forever and ignore signals."""
    script = """
import signal, time
from pipelines.cluster import vitals
vitals._UNWIND_S = 0.5
part = vitals.Part(name="control service", is_alive=lambda: False)
with vitals.Vitals([part], "It is safe to run the same command again").watching():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    time.sleep(60)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert "Ray's control service died\n  It is safe to run the same command again" in result.stdout


def test_unreachable_cluster_is_tolerated_for_a_while(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        part = vitals._remote_part("control service", f"127.0.0.1:{port}", patience_s=55)
        ray_vitals = Vitals([part], "")
        assert ray_vitals.check() is None
    now = [time.monotonic()]
    monkeypatch.setattr(vitals.time, "monotonic", lambda: now[0])
    assert ray_vitals.check() is None
    now[0] += 10
    assert ray_vitals.check() is None
    assert "cannot be reached; the command ends if it is not back in 45 s" in capfd.readouterr().out
    now[0] += 46
    assert "control service" in str(ray_vitals.check())
