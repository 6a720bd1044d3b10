"""The `peagle` command as a process of its own."""

import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def peagle():
    """Start `peagle ARGUMENTS`; whatever a test leaves behind is killed."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "jobs.cli", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture
def leftover_processes():
    """Processes with a path in their command line that are there still, ten seconds later."""

    def find(path):
        for _ in range(100):
            found = [pid for pid in _processes() if _mentions(pid, str(path))]
            if not found:
                break
            time.sleep(0.1)
        return found

    return find


def _processes():
    return subprocess.run(["ps", "-eo", "pid="], capture_output=True, text=True, check=True).stdout.split()


def _mentions(pid, path):
    try:
        return path.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
