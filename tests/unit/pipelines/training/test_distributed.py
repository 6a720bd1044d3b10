"""Tests of training on several workers, without Ray."""

import contextlib
import inspect
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from peagle.drafter.config import TrainConfig
from peagle.drafter.features import extract_here
from peagle.drafter.forward import BatchLoss
from peagle.drafter.metrics import Metrics, TrainingProgress
from peagle.drafter.pipeline import Listener, train_head
from peagle.drafter.training import SingleProcess
from peagle.errors import CapacityError, DivergedError, PeagleError
from peagle.hardware import detect
from pipelines.cluster import ray as cluster
from pipelines.training import distributed
from pipelines.training.distributed import (
    _failure_reason,
    _ProgressFollower,
    _run_in_thread,
    _worker_config,
    train_on_workers,
)


def progress_at(number, train_s=0.5):
    return TrainingProgress(
        step=number, num_steps=9, loss=1.0, accuracy=(), accepted=(), divergence=(), learning_rate=0.1,
        gradient_norm=1.0, num_tokens=1, tokens_per_s=1.0, train_s=train_s,
    )  # fmt: skip


def test_each_step_is_reported_once_when_a_resume_truncates_the_metrics(tmp_path):
    metrics, steps = Metrics(tmp_path), []
    listener = Listener(on_step=lambda progress: steps.append(progress.step))
    metrics.append(progress_at(1))
    with _ProgressFollower(tmp_path, listener, FakeSpending()):
        metrics.append(progress_at(2))
    assert steps == [2]

    with _ProgressFollower(tmp_path, listener, FakeSpending()):
        metrics.truncate(metrics.num_bytes // 2)
        for number, train_s in ((2, 0.123456789), (3, 0.5), (4, 0.5)):  # a longer line for step 2
            metrics.append(progress_at(number, train_s))
    assert steps == [2, 3, 4]


class FakeSpending:
    """A training run's spending. It records whether work was saved or lost."""

    def __init__(self):
        self.records = []
        self.record_saved, self.record_lost = lambda: self.records.append("saved"), lambda: self.records.append("lost")

    def beat(self):
        pass


def test_checkpoint_saves_work_and_truncation_loses_it(tmp_path):
    metrics, spending = Metrics(tmp_path), FakeSpending()
    with _ProgressFollower(tmp_path, Listener(), spending):
        metrics.append(progress_at(1))
    assert spending.records == []
    with _ProgressFollower(tmp_path, Listener(), spending):
        (tmp_path / "checkpoint.pt").touch()
    with _ProgressFollower(tmp_path, Listener(), spending):
        metrics.truncate(0)
    assert spending.records == ["saved", "lost"]


@pytest.fixture(autouse=True)
def node(monkeypatch):
    """Use this machine's hardware for the workers."""
    monkeypatch.setattr(distributed, "inspect", detect)


class WorkerGroupError(Exception):
    """A fake of ray.train's exception, with the errors of workers by rank."""

    def __init__(self, failures):
        super().__init__("Training failed due to worker errors")
        self.worker_failures = failures


def test_last_unindented_line_of_the_first_error_is_reported():
    traceback = "Traceback:\n  File ...\npeagle.errors.PeagleError: the loss is not finite\n  lower the learning rate\n"
    assert (
        _failure_reason(WorkerGroupError({0: Exception(traceback)}))
        == "peagle.errors.PeagleError: the loss is not finite"
    )


def test_ray_errors_are_reported_by_their_last_line():
    assert _failure_reason(RuntimeError("no room\nfor two workers")) == "for two workers"
    assert _failure_reason(RuntimeError()) == "RuntimeError()"


@pytest.mark.parametrize("receiver", ["main thread", "trainer"])
def test_interrupt_reaches_the_main_thread_during_training(monkeypatch, receiver):
    may_end, abandoned = threading.Event(), []
    monkeypatch.setattr(cluster, "abandon", lambda: abandoned.append(True))
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def fit():
        assert threading.get_ident() != main
        time.sleep(0.5)  # until the main thread is waiting
        signal.pthread_kill(main if receiver == "main thread" else threading.get_ident(), signal.SIGINT)
        may_end.wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            _run_in_thread(fit)
    finally:
        may_end.set()
        signal.signal(signal.SIGINT, previous_handler)
    assert abandoned == [True]


def test_ray_train_still_intercepts_interrupts():
    """If this fails, Ray Train restores the SIGINT handler, and `_run_in_thread` is obsolete."""
    from ray.train.torch import TorchTrainer

    previous_handler = signal.getsignal(signal.SIGINT)
    try:
        TorchTrainer(lambda: None)._register_sigint_handler(None)
        assert signal.getsignal(signal.SIGINT) is not previous_handler
        assert "signal.SIG" not in inspect.getsource(TorchTrainer.fit)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def test_trainer_errors_reach_the_caller(monkeypatch):
    monkeypatch.setattr(cluster, "abandon", lambda: pytest.fail("Ray was abandoned although the trainer returned"))

    def fit():
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        _run_in_thread(fit)


def make_config(write_jsonl, **values):
    rows = [{"id": f"row-{i}", "prompt": f"count to {i}", "response": "1 2 3 " * (i + 2)} for i in range(12)]
    defaults = {
        "prompts": write_jsonl(rows), "responses": "given", "num_layers": 1, "num_depths": 3, "draft_vocab_size": 40,
        "batch_tokens": 64, "precision": "fp32", "num_speculative_tokens": 3,
    }  # fmt: skip
    return TrainConfig(**defaults | values)


@pytest.fixture
def worker_in_another_folder(monkeypatch, tmp_path):
    """Replace Ray Train with one worker in this process. The worker has another working directory."""

    class Trainer:
        def __init__(self, work, *, train_loop_config, **_):
            self.work, self.config = work, train_loop_config

        def fit(self):
            (tmp_path / "elsewhere").mkdir()
            previous_folder = Path.cwd()
            os.chdir(tmp_path / "elsewhere")
            try:
                return SimpleNamespace(return_value=self.work(self.config))
            finally:
                os.chdir(previous_folder)

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    monkeypatch.setattr(distributed, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(distributed, "ProcessGroup", lambda _: SingleProcess())


def test_workers_resume_a_training_run_with_relative_paths(
    worker_in_another_folder, chat_target, write_jsonl, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(chat_target, "tiny")
    config = make_config(write_jsonl, model="tiny", prompts="prompts.jsonl", output="first", time_budget_s=1e-9)
    train_head(config, Listener())
    second = config.model_copy(update={"output": Path("second"), "features": Path("states"), "init": "first/head"})
    interrupted = train_head(second, Listener())
    resumed = train_on_workers(second.model_copy(update={"workers": 2, "time_budget_s": None}), Listener())
    assert (interrupted["finished"], resumed["finished"]) == (False, True)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "2 workers with a CPU each" in Path("second/head/README.md").read_text()


@pytest.mark.parametrize(
    ("requested", "num_gpus", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")],
)
def test_training_device_is_the_requested_one_or_that_of_the_cluster(
    chat_target, write_jsonl, tmp_path, monkeypatch, requested, num_gpus, device
):
    devices = []

    class Trainer:
        def __init__(self, _work, *, train_loop_config, scaling_config, run_config):
            devices.append((train_loop_config["settings"]["device"], scaling_config.use_gpu))

        def fit(self):
            raise RuntimeError("no training in this test")

    def extract_on_this_machine(job, progress, *, device, **_):
        devices.append(device)
        extract_here(job, progress)

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": float(num_gpus)})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(distributed, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr(distributed, "extract_on_actors", extract_on_this_machine)
    config = make_config(write_jsonl, model=str(chat_target), output=tmp_path / "out", device=requested, workers=2)
    with pytest.raises(PeagleError, match="the workers failed: no training in this test"):
        train_on_workers(config, Listener())
    assert devices == [device, (device, device == "cuda")]


def test_gpus_missing_in_the_cluster_are_refused(worker_in_another_folder, write_jsonl, tmp_path):
    config = make_config(write_jsonl, output=tmp_path / "out", device="cuda", workers=2)
    with pytest.raises(CapacityError, match="2 workers need a GPU each; the cluster has 0\n  use --device cpu"):
        train_on_workers(config, Listener())


def test_workers_with_non_finite_loss_are_not_restarted(
    worker_in_another_folder, chat_target, write_jsonl, tmp_path, monkeypatch
):
    config = make_config(write_jsonl, model=str(chat_target), output=tmp_path / "out", time_budget_s=1e-9)
    train_head(config, Listener())
    nan_loss = BatchLoss.zeros(config.num_depths, "cpu")
    nan_loss = replace(nan_loss, loss=torch.tensor(float("nan"), requires_grad=True))
    monkeypatch.setattr("peagle.drafter.training.batch_loss", lambda *_, **__: nan_loss)
    message = r"step 1: the loss is not finite; documents row-\d.*\n  .* --init .*/out/head"
    with pytest.raises(DivergedError, match=message):
        train_on_workers(config.model_copy(update={"workers": 2}), Listener())
    assert (config.output / "ledger").is_dir()


def test_names_that_are_not_paths_reach_workers_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    sources = ["stdlib", "package:json", "mine.jsonl", "s3://bucket/mine.jsonl"]
    excluded = ["humaneval", "held.jsonl"]
    worker_config = _worker_config(TrainConfig(model="smollm2-135m", prompts=sources, output="out", exclude=excluded))
    assert (worker_config.model, worker_config.init, worker_config.features) == ("smollm2-135m", "warm", None)
    assert worker_config.exclude == ["humaneval", str(tmp_path / "held.jsonl")]
    assert worker_config.prompts == ["stdlib", "package:json", str(tmp_path / "mine.jsonl"), "s3://bucket/mine.jsonl"]
    assert _worker_config(TrainConfig(model="org/name", prompts=sources, output="out")).model == "org/name"
