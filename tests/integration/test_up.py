"""`peagle up` and `peagle down` with two background endpoints and the fake engine. One endpoint stops when idle."""

import json
import time
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def run(peagle, tmp_path, monkeypatch):
    """Return a function that runs a command and returns its JSON and its output."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))

    def run(*arguments):
        process = peagle(*arguments, "--json", tmp_path / "result.json")
        stdout, _ = process.communicate(timeout=300)
        assert process.returncode == 0, stdout
        return json.loads((tmp_path / "result.json").read_text()), stdout

    yield run
    for path in (tmp_path / "home" / "endpoints").glob("*/endpoint.json"):
        pid = json.loads(path.read_text())["pid"]
        if psutil.pid_exists(pid):  # after a failed test
            psutil.Process(pid).terminate()


def test_up_list_down_and_idle_timeout(run):
    fake = ("--engine", "fake", "--usd-per-hour", 3600, "--heartbeat-s", 1, "--drain-s", 1)
    started, output = run("up", *fake, "--name", "one")
    assert (started["status"], f"one is up at {started['url']}" in output) == ("up", True)
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
    httpx.post(f"{started['url']}/chat/completions", json=body, timeout=60).raise_for_status()
    (listed,) = run("up", "--list")[0]["endpoints"]
    assert (listed["name"], listed["status"], listed["usd"] > 0) == ("one", "up", True)
    idle, _ = run("up", *fake, "--name", "two", "--idle-timeout", "8s")
    assert idle["url"] != started["url"]
    ended, output = run("down", "one")
    assert (ended["status"], "its engines cost $" in output) == ("ended", True)
    until = time.monotonic() + 120
    while {endpoint["status"] for endpoint in run("up", "--list")[0]["endpoints"]} != {"ended"}:
        assert time.monotonic() < until
    *_, reason, stopping, cost = Path(idle["log"]).read_text().splitlines()
    assert reason == "no requests for 8.0 s: stopping the endpoint"
    assert stopping.startswith("stopping: ")
    assert cost.startswith("its engines cost $")
