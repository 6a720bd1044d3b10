"""What the driver tells of a training on several workers, whose first worker writes the metrics file."""

import signal
import threading

import pytest

from peagle.drafter.metrics import Metrics, Progress
from peagle.drafter.pipeline import Listener
from pipelines.training import distributed
from pipelines.training.distributed import _Follower, _outside_the_main_thread, _reason


def step(number, train_s=0.5):
    return Progress(
        step=number, num_steps=9, loss=1.0, accuracy=(), accepted=(), divergence=(), learning_rate=0.1,
        gradient_norm=1.0, num_tokens=1, tokens_per_s=1.0, train_s=train_s,
    )  # fmt: skip


def test_steps_of_this_attempt_are_told_also_when_a_resume_cuts_the_file_back_and_writes_beyond(tmp_path):
    metrics, told = Metrics(tmp_path), []
    listener = Listener(step=lambda progress: told.append(progress.step))
    metrics.append(step(1))
    with _Follower(metrics, listener):
        metrics.append(step(2))
    assert told == [2]

    follower = _Follower(metrics, listener)
    with follower:
        metrics.cut(metrics.num_bytes // 2)
        for number, train_s in ((2, 0.123456789), (3, 0.5), (4, 0.5)):
            metrics.append(step(number, train_s))
    assert told == [2, 3, 4]


class WorkerGroupError(Exception):
    """As ray.train raises it: the workers' tracebacks, each as a text, by rank."""

    def __init__(self, failures):
        super().__init__("Training failed due to worker errors")
        self.worker_failures = failures


def test_what_the_first_worker_said_last_is_told():
    traceback = "Traceback:\n  File ...\npeagle.errors.PeagleError: the loss is not finite\n  lower the learning rate\n"
    assert _reason(WorkerGroupError({0: Exception(traceback)})) == "peagle.errors.PeagleError: the loss is not finite"


def test_an_error_of_ray_itself_is_told_by_its_last_line():
    assert _reason(RuntimeError("no room\nfor two workers")) == "for two workers"
    assert _reason(RuntimeError()) == "RuntimeError()"


def test_an_interrupt_reaches_the_main_thread_while_a_trainer_runs(monkeypatch):
    ended, abandoned = threading.Event(), []
    monkeypatch.setattr(distributed, "abandon", lambda: abandoned.append(True))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def fit():
        assert threading.get_ident() != main
        signal.pthread_kill(main, signal.SIGINT)
        ended.wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            _outside_the_main_thread(fit)
    finally:
        ended.set()
        signal.signal(signal.SIGINT, before)
    assert abandoned == [True]


def test_a_trainers_error_is_the_callers(monkeypatch):
    monkeypatch.setattr(distributed, "abandon", lambda: pytest.fail("it has come back"))

    def fit():
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        _outside_the_main_thread(fit)
