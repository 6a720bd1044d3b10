"""The time limit of a start: hanging child processes, and hangs in this process."""

import multiprocessing
import signal
import subprocess
import sys
import time

import pytest

from peagle.engine import startup as module
from peagle.engine.startup import VARIABLE, start_limit, start_limit_s
from peagle.engine.vllm import kill_children
from peagle.errors import ConfigError, EngineError
from peagle.signals import interrupted_by_signal


@pytest.fixture
def limit_of_one_second(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


def test_start_within_the_limit(limit_of_one_second):
    killed = []
    with start_limit(lambda: killed.append(True)):
        pass
    with pytest.raises(ValueError, match="of its own"), start_limit(lambda: killed.append(True)):
        raise ValueError("of its own")
    time.sleep(1.2)
    assert not killed


def test_hanging_child_process_is_killed(limit_of_one_second):
    """vLLM waits until its core reports that it is ready or exits."""
    started_at = time.monotonic()

    def start_core():
        core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
        core.start()
        core.join()
        raise RuntimeError("Engine core initialization failed")

    with pytest.raises(EngineError, match="did not start within 1 s") as error, start_limit(kill_children):
        start_core()
    assert time.monotonic() - started_at < 60
    assert VARIABLE in error.value.hint


def test_hanging_start_is_interrupted(limit_of_one_second, monkeypatch):
    monkeypatch.setattr(module, "_UNWIND_S", 0.2)
    with interrupted_by_signal(), pytest.raises(EngineError, match="within 1 s"), start_limit(lambda: None):
        time.sleep(300)


_HANGS = f"""
import os, signal
os.environ["{VARIABLE}"] = "1"
from peagle.engine import startup
startup._UNWIND_S = 0.2
signal.signal(signal.SIGINT, signal.SIG_IGN)
with startup.start_limit(lambda: None):
    signal.sigwait([signal.SIGUSR1])
"""


def test_uninterruptible_start_ends_the_process():
    done = subprocess.run([sys.executable, "-c", _HANGS], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "did not start within 1 s, and cannot be aborted" in done.stdout


def test_interrupt_is_not_a_timeout(monkeypatch):
    monkeypatch.setenv(VARIABLE, "60")
    with pytest.raises(KeyboardInterrupt), interrupted_by_signal(), start_limit(lambda: None):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("text", ["soon", "0", "-5", "1.5"])
def test_invalid_limit_names_the_variable(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=VARIABLE):
        start_limit_s()


def test_default_limit(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert start_limit_s() == module.DEFAULT_S
