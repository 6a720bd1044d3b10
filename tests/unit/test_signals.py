"""SIGINT and SIGTERM interrupt or stop a command, even if they are sent repeatedly."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from peagle import signals
from peagle.signals import signals_as_interrupts, stop_on_signal

BOTH_SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture
def clock(monkeypatch):
    """The clock of the signal handlers, in seconds."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def exit_codes(monkeypatch):
    """The exit codes of immediate exits."""
    codes = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    return codes


@BOTH_SIGNALS
def test_signal_requests_a_stop_and_handler_is_restored(number):
    previous_handler, stop = signal.getsignal(number), threading.Event()
    with stop_on_signal(stop, message=""):
        signal.raise_signal(number)
        assert stop.is_set()
    assert signal.getsignal(number) is previous_handler


@BOTH_SIGNALS
def test_signal_interrupts_and_handler_is_restored(number):
    previous_handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), signals_as_interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is previous_handler


@BOTH_SIGNALS
def test_repeated_signal_within_a_second_is_ignored(clock, exit_codes, number):
    stop = threading.Event()
    with stop_on_signal(stop, message=""):
        signal.raise_signal(number)
        clock[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        assert not exit_codes
        clock[0] += 0.2
        signal.raise_signal(number)
        assert exit_codes == [3]


def test_repeated_signal_is_ignored_by_next_handler(clock):
    with signals_as_interrupts():
        with stop_on_signal(threading.Event(), message=""):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # ignored, because shutdown has started
        clock[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_ignored_signal_stays_ignored():
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def test_other_threads_do_not_change_handlers():
    handlers = []

    def enter_handlers():
        with signals_as_interrupts(), stop_on_signal(threading.Event(), message=""):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter_handlers)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


@BOTH_SIGNALS
def test_interrupted_event_loop_runs_cleanup(number):
    done = []

    async def wait():
        try:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), signals_as_interrupts():
        asyncio.run(wait())
    assert done == ["cleaned up"]


_STOPPING_SCRIPT = """
import threading
from peagle.signals import install_signal_handlers, stop_on_signal
install_signal_handlers()
with stop_on_signal(threading.Event(), message="stopped immediately"):
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_second_signal_exits_with_message():
    process = subprocess.Popen([sys.executable, "-c", _STOPPING_SCRIPT], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(1.2)
    stdout, _ = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "stopped immediately" in stdout


_INTERRUPTED_SCRIPT = """
import time
from jobs import cli
def run(argv):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        return 3
cli.run = run
cli.main([])
"""


@BOTH_SIGNALS
def test_simultaneous_signals_keep_exit_code(number):
    """`timeout` sends the signal to its child and then to the process group, so the child gets it twice."""
    process = subprocess.Popen([sys.executable, "-c", _INTERRUPTED_SCRIPT], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        os.kill(process.pid, number)
        time.sleep(0.05)
    process.communicate(timeout=20)
    assert process.returncode == 3
