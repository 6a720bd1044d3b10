"""A process of Ray is killed while a command runs: the message names the process and how to continue."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from peagle.ports import free_port

SLOW_ENGINE = '{"token_s": 0.05}'
MAX_EXIT_S = 40.0


@contextlib.contextmanager
def command(tmp_path, arguments, ready):
    """Start a command and wait until it prints `ready`. Yield its process and a function that returns its output."""
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *arguments], stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            wait_until(lambda: ready in log.read_text(), process)
            yield process, log.read_text
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def wait_until(condition, process, timeout_s=90):
    until = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the command has ended"
        assert time.monotonic() < until, f"the condition is not met after {timeout_s} s"
        time.sleep(0.2)


def find_process(process, name):
    """Return the descendant process whose name is `name`, or whose command line starts with it."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() == name or " ".join(child.cmdline()).startswith(name):
                return child
    raise AssertionError(f"there is no {name}")


def generate_arguments(tmp_path):
    rows = "".join(json.dumps({"prompt": f"row {index}"}) + "\n" for index in range(4000))
    (tmp_path / "in.jsonl").write_text(rows)
    arguments = ["generate", "--engine", "fake", "--fake", SLOW_ENGINE, "--usd-per-hour", "1", "--rows-per-unit", "8"]
    arguments += ["--max-num-seqs", "2", "--max-tokens", "200"]
    return [*arguments, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "run")]


def serve_arguments(tmp_path, port):
    arguments = ["serve", "--engine", "fake", "--fake", SLOW_ENGINE, "--usd-per-hour", "1", "--port", str(port)]
    return [*arguments, "--state", str(tmp_path / "state")]


GCS = ("gcs_server", "control service (gcs_server), process ")
RAYLET = ("raylet", "raylet, process ")


@pytest.mark.parametrize(
    ("subcommand", "name", "message"),
    [
        ("generate", *RAYLET),
        ("serve", *GCS),
        pytest.param("generate", *GCS, marks=pytest.mark.soak),
        pytest.param("serve", *RAYLET, marks=pytest.mark.soak),
    ],
)
def test_command_reports_which_ray_process_died(tmp_path, subcommand, name, message):
    arguments, ready = (
        (generate_arguments(tmp_path), "output tokens/s")
        if subcommand == "generate"
        else (serve_arguments(tmp_path, free_port()), "http://127")
    )
    with command(tmp_path, arguments, ready) as (process, get_output):
        if subcommand == "generate":
            wait_until(lambda: any((tmp_path / "run").rglob("unit-*")), process)
        ray_processes = psutil.Process(process.pid).children(recursive=True)
        find_process(process, name).kill()
        started_at = time.monotonic()
        assert process.wait(MAX_EXIT_S) == 1
        assert time.monotonic() - started_at < MAX_EXIT_S
        assert f"peagle {subcommand}: Ray's {message}" in get_output() or f"peagle: Ray's {message}" in get_output()
        assert "safe to" in get_output()
        _, alive = psutil.wait_procs(ray_processes, timeout=30)
        assert [remaining.cmdline() for remaining in alive if remaining.status() != psutil.STATUS_ZOMBIE] == []
    if subcommand == "generate":
        faster = [argument.replace("0.05", "0") for argument in arguments]
        assert subprocess.run([sys.executable, "-m", "jobs.cli", *faster], capture_output=True).returncode == 0


def test_endpoint_reports_crashes_and_restarts_of_ray_serve(tmp_path):
    port = free_port()
    with command(tmp_path, serve_arguments(tmp_path, port), "http://127") as (process, get_output):
        for name, kind in (("ray::ServeController", "controller"), ("ray::ProxyActor", "proxy")):
            find_process(process, name).kill()
            wait_until(lambda kind=kind: f"Serve's {kind} died: " in get_output(), process, 15)
            wait_until(lambda kind=kind: f"Serve's {kind} is back after " in get_output(), process, 60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            assert answer.status == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
