"""Fixtures that run the `peagle` command as a process."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.chaos.processes import command_line


@pytest.fixture
def peagle():
    """Return a function that starts `peagle ARGUMENTS` in its own process group, and kills it after the test."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-m", "jobs.cli", *map(str, arguments)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture
def leftover_processes():
    """Return a function that waits up to 75 s until no command line contains a given path.

    The function returns the command lines that remain. The wait is long, because a Ray worker that starts while its
    raylet is killed tries to reach the raylet for half a minute.
    """

    def find(path):
        deadline = time.monotonic() + 75
        while result := [line for pid in psutil.pids() if str(path) in (line := command_line(pid))]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return result

    return find
