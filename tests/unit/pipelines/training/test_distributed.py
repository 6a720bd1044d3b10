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
from pipelines.training import distributed
from pipelines.training.distributed import (
    _ProgressFollower,
    _reason,
    _run_in_thread,
    _worker_config,
    train_on_workers,
)


def step(number, train_s=0.5):
    return TrainingProgress(
        step=number, num_steps=9, loss=1.0, accuracy=(), accepted=(), divergence=(), learning_rate=0.1,
        gradient_norm=1.0, num_tokens=1, tokens_per_s=1.0, train_s=train_s,
    )  # fmt: skip


def test_steps_are_reported_when_a_resume_truncates_and_extends_the_file(tmp_path):
    metrics, steps = Metrics(tmp_path), []
    listener = Listener(step=lambda progress: steps.append(progress.step))
    metrics.append(step(1))
    with _ProgressFollower(tmp_path, listener, RecordedSpend()):
        metrics.append(step(2))
    assert steps == [2]

    with _ProgressFollower(tmp_path, listener, RecordedSpend()):
        metrics.truncate(metrics.num_bytes // 2)
        for number, train_s in ((2, 0.123456789), (3, 0.5), (4, 0.5)):
            metrics.append(step(number, train_s))
    assert steps == [2, 3, 4]


class RecordedSpend:
    """A training session that records whether its work was saved or lost."""

    def __init__(self):
        self.records = []
        self.record_saved, self.record_lost = lambda: self.records.append("saved"), lambda: self.records.append("lost")

    def beat(self):
        pass


def test_work_is_counted_with_checkpoints_and_lost_with_truncated_steps(tmp_path):
    metrics, spent = Metrics(tmp_path), RecordedSpend()
    with _ProgressFollower(tmp_path, Listener(), spent):
        metrics.append(step(1))
    assert spent.records == []
    with _ProgressFollower(tmp_path, Listener(), spent):
        (tmp_path / "checkpoint.pt").touch()
    with _ProgressFollower(tmp_path, Listener(), spent):
        metrics.truncate(0)
    assert spent.records == ["saved", "lost"]


@pytest.fixture(autouse=True)
def node(monkeypatch):
    """Use this machine's hardware for the workers."""
    monkeypatch.setattr(distributed, "inspect", detect)


class WorkerGroupError(Exception):
    """Like ray.train's: the tracebacks of workers by rank."""

    def __init__(self, failures):
        super().__init__("Training failed due to worker errors")
        self.worker_failures = failures


def test_last_line_of_the_first_worker_is_reported():
    traceback = "Traceback:\n  File ...\npeagle.errors.PeagleError: the loss is not finite\n  lower the learning rate\n"
    assert _reason(WorkerGroupError({0: Exception(traceback)})) == "peagle.errors.PeagleError: the loss is not finite"


def test_ray_errors_are_reported_by_their_last_line():
    assert _reason(RuntimeError("no room\nfor two workers")) == "for two workers"
    assert _reason(RuntimeError()) == "RuntimeError()"


@pytest.mark.parametrize("receiver", ["main thread", "trainer"])
def test_interrupt_reaches_the_main_thread_during_training(monkeypatch, receiver):
    ended, abandoned = threading.Event(), []
    monkeypatch.setattr(distributed, "abandon", lambda: abandoned.append(True))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def fit():
        assert threading.get_ident() != main
        time.sleep(0.5)  # by now, the main thread is waiting
        signal.pthread_kill(main if receiver == "main thread" else threading.get_ident(), signal.SIGINT)
        ended.wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            _run_in_thread(fit)
    finally:
        ended.set()
        signal.signal(signal.SIGINT, before)
    assert abandoned == [True]


def test_ray_train_still_intercepts_interrupts():
    """If this fails, Ray Train restores the SIGINT handler, and `_run_in_thread` is obsolete."""
    from ray.train.torch import TorchTrainer

    before = signal.getsignal(signal.SIGINT)
    try:
        TorchTrainer(lambda: None)._register_sigint_handler(None)
        assert signal.getsignal(signal.SIGINT) is not before
        assert "signal.SIG" not in inspect.getsource(TorchTrainer.fit)
    finally:
        signal.signal(signal.SIGINT, before)


def test_trainer_errors_reach_the_caller(monkeypatch):
    monkeypatch.setattr(distributed, "abandon", lambda: pytest.fail("Ray was abandoned although the trainer returned"))

    def fit():
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        _run_in_thread(fit)


def training(write_jsonl, **values):
    rows = [{"id": f"row-{i}", "prompt": f"count to {i}", "response": "1 2 3 " * (i + 2)} for i in range(12)]
    small = {
        "prompts": write_jsonl(rows), "responses": "given", "num_layers": 1, "num_depths": 3, "draft_vocab_size": 40,
        "batch_tokens": 64, "precision": "fp32", "num_speculative_tokens": 3,
    }  # fmt: skip
    return TrainConfig(**small | values)


@pytest.fixture
def worker_elsewhere(monkeypatch, tmp_path):
    """Replace Ray Train with one worker in this process with another working directory."""

    class Trainer:
        def __init__(self, work, *, train_loop_config, **_):
            self.work, self.config = work, train_loop_config

        def fit(self):
            (tmp_path / "elsewhere").mkdir()
            before = Path.cwd()
            os.chdir(tmp_path / "elsewhere")
            try:
                return SimpleNamespace(return_value=self.work(self.config))
            finally:
                os.chdir(before)

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    monkeypatch.setattr(distributed, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(distributed, "ProcessGroup", lambda _: SingleProcess())


def test_workers_resume_a_training_with_relative_paths(
    worker_elsewhere, chat_target, write_jsonl, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(chat_target, "tiny")
    config = training(write_jsonl, model="tiny", prompts="prompts.jsonl", output="first", time_budget_s=1e-9)
    train_head(config, Listener())
    second = config.model_copy(update={"output": Path("second"), "features": Path("states"), "init": "first/head"})
    started = train_head(second, Listener())
    resumed = train_on_workers(second.model_copy(update={"workers": 2, "time_budget_s": None}), Listener())
    assert (started["finished"], resumed["finished"]) == (False, True)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "2 workers with a CPU each" in Path("second/head/README.md").read_text()


@pytest.mark.parametrize(
    ("requested", "gpus", "device"), [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")]
)
def test_cluster_hardware_determines_the_training_device(
    chat_target, write_jsonl, tmp_path, monkeypatch, requested, gpus, device
):
    seen = []

    class Trainer:
        def __init__(self, _train_worker, *, train_loop_config, scaling_config, run_config):
            seen.append((train_loop_config["settings"]["device"], scaling_config.use_gpu))

        def fit(self):
            raise RuntimeError("no training in this test")

    def extract_on_this_machine(job, progress, *, device, **_):
        seen.append(device)
        extract_here(job, progress)

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": float(gpus)})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(distributed, "ray_cluster", contextlib.nullcontext)
    monkeypatch.setattr(distributed, "extract_on_actors", extract_on_this_machine)
    config = training(write_jsonl, model=str(chat_target), output=tmp_path / "out", device=requested, workers=2)
    with pytest.raises(PeagleError, match="the workers failed: no training in this test"):
        train_on_workers(config, Listener())
    assert seen == [device, (device, device == "cuda")]


def test_gpus_missing_in_the_cluster_are_refused(worker_elsewhere, write_jsonl, tmp_path):
    config = training(write_jsonl, output=tmp_path / "out", device="cuda", workers=2)
    with pytest.raises(CapacityError, match="2 workers need a GPU each; the cluster has 0\n  use --device cpu"):
        train_on_workers(config, Listener())


def test_workers_with_non_finite_loss_are_not_restarted(
    worker_elsewhere, chat_target, write_jsonl, tmp_path, monkeypatch
):
    config = training(write_jsonl, model=str(chat_target), output=tmp_path / "out", time_budget_s=1e-9)
    train_head(config, Listener())
    no_loss = BatchLoss.zeros(config.num_depths, "cpu")
    no_loss = replace(no_loss, loss=torch.tensor(float("nan"), requires_grad=True))
    monkeypatch.setattr("peagle.drafter.training.batch_loss", lambda *_, **__: no_loss)
    message = r"step 1: the loss is not finite; documents row-\d.*\n  .* --init .*/out/head"
    with pytest.raises(DivergedError, match=message):
        train_on_workers(config.model_copy(update={"workers": 2}), Listener())
    assert (config.output / "ledger").is_dir()


def test_names_that_are_not_paths_reach_workers_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    sources = ["stdlib", "package:json", "mine.jsonl", "s3://bucket/mine.jsonl"]
    excluded = ["humaneval", "held.jsonl"]
    parameters = _worker_config(TrainConfig(model="smollm2-135m", prompts=sources, output="out", exclude=excluded))
    assert (parameters.model, parameters.init, parameters.features) == ("smollm2-135m", "warm", None)
    assert parameters.exclude == ["humaneval", str(tmp_path / "held.jsonl")]
    assert parameters.prompts == ["stdlib", "package:json", str(tmp_path / "mine.jsonl"), "s3://bucket/mine.jsonl"]
    assert _worker_config(TrainConfig(model="org/name", prompts=sources, output="out")).model == "org/name"
