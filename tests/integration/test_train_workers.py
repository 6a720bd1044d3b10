"""Training with two Ray Train workers equals training in one process, with the tiny target in float32."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import yaml

from peagle.drafter.config import TrainConfig
from peagle.drafter.pipeline import Listener, train_head
from peagle.errors import DivergedError
from pipelines.training.distributed import train_on_workers

pytestmark = pytest.mark.timeout(300)
NUM_STEPS = 24


@pytest.fixture
def make_config(chat_target, write_jsonl):
    responses = write_jsonl(
        [{"id": str(i), "prompt": f"count to {i}", "response": "1 2 3 " * (i % 7 + 2)} for i in range(40)]
    )

    def make(output, **changes):
        values = {
            "num_depths": 3, "draft_vocab_size": 40, "batch_tokens": 300, "precision": "fp32", "device": "cpu",
            "epochs": 4, "warmup_steps": 5, "num_speculative_tokens": 3,
        }  # fmt: skip
        return TrainConfig(
            model=str(chat_target),
            prompts=[responses],
            responses="given",
            output=output,
            **{**values, **changes},
        )

    return make


def curve(output):
    return [json.loads(line) for line in (output / "training" / "metrics.jsonl").read_text().splitlines()]


def test_two_workers_have_the_same_losses_as_one_process(ray_cluster, make_config, tmp_path):
    steps, sigint_handler = [], signal.getsignal(signal.SIGINT)
    single = train_head(make_config(tmp_path / "single"), Listener())
    two_workers = train_on_workers(make_config(tmp_path / "two-workers", workers=2), Listener(on_step=steps.append))

    single_curve, two_workers_curve = curve(tmp_path / "single"), curve(tmp_path / "two-workers")
    assert len(single_curve) == len(two_workers_curve) >= NUM_STEPS - 4
    assert [line["loss"] for line in two_workers_curve] == pytest.approx(
        [line["loss"] for line in single_curve], abs=1e-4
    )
    assert [line["num_tokens"] for line in two_workers_curve] == [line["num_tokens"] for line in single_curve]
    assert [step.step for step in steps] == [line["step"] for line in two_workers_curve]
    assert signal.getsignal(signal.SIGINT) is sigint_handler  # Ray Train would replace the handler
    assert two_workers["finished"]
    assert two_workers["tokens_seen"] == single["tokens_seen"]
    assert (tmp_path / "two-workers" / "head" / "model.safetensors").is_file()


@pytest.mark.soak
def test_non_finite_loss_stops_the_workers_and_saves_a_head(ray_cluster, make_config, tmp_path):
    train_head(make_config(tmp_path, time_budget_s=1e-9), Listener())
    file = tmp_path / "training" / "checkpoint.pt"
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["weights"]["norm.weight"].fill_(float("nan"))
    torch.save(checkpoint, file)
    mtime_ns = (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(DivergedError, match="step 1: the loss is not finite"):
        train_on_workers(make_config(tmp_path, workers=2), Listener())
    assert (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns > mtime_ns


def train_worker_pids(ancestor=None):
    """Return the process ids of the Ray Train workers that descend from a process (default: this process)."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    processes = {
        int(pid): (int(parent), args) for pid, parent, args in (line.split(None, 2) for line in listing.splitlines())
    }

    def is_descendant(pid):
        return pid == (ancestor or os.getpid()) or (pid in processes and is_descendant(processes[pid][0]))

    return [pid for pid, (_, args) in processes.items() if "RayTrainWorker" in args and is_descendant(pid)]


@pytest.mark.soak
def test_interrupt_ends_training_and_workers(make_config, tmp_path):
    output, run = tmp_path / "cut", make_config(tmp_path / "cut", workers=2, epochs=400)
    settings = tmp_path / "train.yaml"
    settings.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "jobs.train", "--config", str(settings)]
    with (tmp_path / "output").open("w+") as output_file:
        process = subprocess.Popen(command, stdout=output_file, stderr=output_file, text=True, start_new_session=True)
        try:
            metrics = output / "training" / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_bytes()):
                assert process.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.2)
            workers = train_worker_pids(ancestor=process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 3
        finally:
            process.kill()
    assert "interrupted" in (tmp_path / "output").read_text().splitlines()[-1]
    assert len(workers) == 2
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in workers):
        time.sleep(0.2)


@pytest.mark.soak
def test_training_continues_with_more_workers_and_after_a_killed_worker(ray_cluster, make_config, tmp_path):
    killed_pids = []

    def kill(progress):
        if not killed_pids:
            killed_pids.append(train_worker_pids()[0])
            os.kill(killed_pids[0], signal.SIGKILL)

    changes = {"epochs": 25}
    train_head(make_config(tmp_path / "uninterrupted", **changes), Listener())
    train_head(make_config(tmp_path / "cut", time_budget_s=1e-9, **changes), Listener())  # a checkpoint to resume from
    result = train_on_workers(make_config(tmp_path / "cut", workers=2, **changes), Listener(on_step=kill))
    assert killed_pids
    assert killed_pids[0] not in train_worker_pids()
    assert result["finished"]
    uninterrupted, cut = curve(tmp_path / "uninterrupted"), curve(tmp_path / "cut")
    assert [line["step"] for line in cut] == [line["step"] for line in uninterrupted]
    assert [line["loss"] for line in cut] == pytest.approx([line["loss"] for line in uninterrupted], abs=1e-4)
