"""The time limit of a start, and interrupts, which vLLM's `zmq_socket_ctx` swallows."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from peagle.engine import startup as module
from peagle.engine.startup import TIMEOUT_VARIABLE, interruptible, start_limit, start_limit_s
from peagle.engine.vllm import kill_children
from peagle.errors import ConfigError, EngineError
from peagle.signals import signals_as_interrupts


@pytest.fixture
def limit_of_one_second(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1")


def test_start_within_the_limit_kills_nothing(limit_of_one_second):
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
    assert TIMEOUT_VARIABLE in error.value.hint


def test_hanging_start_is_interrupted(limit_of_one_second, monkeypatch):
    monkeypatch.setattr(module, "_UNWIND_S", 0.2)
    with signals_as_interrupts(), pytest.raises(EngineError, match="within 1 s"), start_limit(lambda: None):
        time.sleep(300)


_HANGING_SCRIPT = f"""
import os, signal
os.environ["{TIMEOUT_VARIABLE}"] = "1"
from peagle.engine import startup
startup._UNWIND_S = 0.2
signal.signal(signal.SIGINT, signal.SIG_IGN)
with startup.start_limit(lambda: None):
    signal.sigwait([signal.SIGUSR1])
"""


def test_uninterruptible_start_ends_the_process():
    command = [sys.executable, "-c", _HANGING_SCRIPT]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "did not start within 1 s, and cannot be aborted" in result.stdout


def test_interrupt_is_not_a_timeout(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "60")
    with pytest.raises(KeyboardInterrupt), signals_as_interrupts(), start_limit(lambda: None):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("text", ["soon", "0", "-5", "1.5"])
def test_invalid_limit_names_the_variable(monkeypatch, text):
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=TIMEOUT_VARIABLE):
        start_limit_s()


def test_limit_has_a_default(monkeypatch):
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    assert start_limit_s() == module.DEFAULT_S


@pytest.fixture
def default_handler():
    """Python's default handler, regardless of earlier tests."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, previous_handler)


def start_interrupted(address, number=signal.SIGINT):
    """Open the socket for the core's ready message, and raise a signal, as if it arrived during the wait."""
    import zmq
    from vllm.utils.network_utils import zmq_socket_ctx

    with zmq_socket_ctx(address, zmq.ROUTER, bind=True) as socket, closing(socket):
        signal.raise_signal(number)
    return "still waiting"


def test_vllm_swallows_interrupts_at_start(tmp_path, default_handler):
    assert start_interrupted(f"ipc://{tmp_path}/core") == "still waiting"


def test_interrupt_ends_a_start(tmp_path, default_handler):
    with pytest.raises(KeyboardInterrupt), interruptible():
        start_interrupted(f"ipc://{tmp_path}/core")
    assert signal.getsignal(signal.SIGINT) is default_handler


def test_foreign_handler_that_raises_ends_a_start(tmp_path, default_handler):
    seen = []

    def handle(*_):
        seen.append("other")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    with pytest.raises(KeyboardInterrupt), interruptible():
        start_interrupted(f"ipc://{tmp_path}/core")
    assert seen == ["other"]
    assert signal.getsignal(signal.SIGINT) is handle


def test_foreign_handler_that_returns_does_not_end_a_start(default_handler):
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("other"))
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert seen == ["other"]


def test_ignored_interrupt_stays_ignored(default_handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_interruptible_has_no_effect_in_another_thread(default_handler):
    entered = []

    def start():
        with interruptible():
            entered.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert entered == [True]


def test_sigterm_ends_a_start(tmp_path, default_handler):
    previous_handler = signal.getsignal(signal.SIGTERM)
    with signals_as_interrupts():
        peagle_handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), interruptible():
            start_interrupted(f"ipc://{tmp_path}/core", signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is peagle_handler
    assert signal.getsignal(signal.SIGTERM) is previous_handler
