"""Interrupts while an engine starts. vLLM's own context manager swallows them."""

import signal
import threading
from contextlib import closing

import pytest

from peagle.engine.startup import interruptible
from peagle.signals import interrupted_by_signal


@pytest.fixture(autouse=True)
def handler():
    """Python's default handler, regardless of earlier tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def start_interrupted(address: str, number: int = signal.SIGINT) -> str:
    """Open the socket for the core's ready message, and raise a signal."""
    import zmq
    from vllm.utils.network_utils import zmq_socket_ctx

    with zmq_socket_ctx(address, zmq.ROUTER, bind=True) as socket, closing(socket):
        signal.raise_signal(number)
    return "still waiting"


def test_vllm_swallows_interrupts_at_start(tmp_path):
    assert start_interrupted(f"ipc://{tmp_path}/core") == "still waiting"


def test_interrupt_ends_a_start(tmp_path, handler):
    with pytest.raises(KeyboardInterrupt), interruptible():
        start_interrupted(f"ipc://{tmp_path}/core")
    assert signal.getsignal(signal.SIGINT) is handler


def test_foreign_handler_that_raises_ends_a_start(tmp_path):
    seen = []

    def handle(*_):
        seen.append("other")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    with pytest.raises(KeyboardInterrupt), interruptible():
        start_interrupted(f"ipc://{tmp_path}/core")
    assert seen == ["other"]
    assert signal.getsignal(signal.SIGINT) is handle


def test_foreign_handler_that_returns_does_not_end_a_start():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("other"))
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert seen == ["other"]


def test_ignored_interrupt_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_start_in_another_thread():
    done = []

    def start():
        with interruptible():
            done.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert done == [True]


def test_sigterm_ends_a_start(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with interrupted_by_signal():
        peagle_handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), interruptible():
            start_interrupted(f"ipc://{tmp_path}/core", signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is peagle_handler
    assert signal.getsignal(signal.SIGTERM) is before
