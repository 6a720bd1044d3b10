"""Jobs on a cluster of several nodes on this machine. Runs stop, nodes leave and join, and the head is replaced.

Each node has its own loopback address. Bulk runs use fake engines; the training and the benchmark use real ones.
"""

import json
import logging
import sys
import time

import pyarrow.parquet as pq
import pytest

from peagle import hardware
from peagle.runs.directory import RunDirectory
from tests.chaos import processes
from tests.chaos.audit import audit
from tests.chaos.driver import Job
from tests.chaos.ray_nodes import ROOT, RayNodes
from tests.ray_jobs import RayJobs

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
_log = logging.getLogger(__name__)  # `-rP --log-level=INFO` shows durations
GRACE_S = 5
NUM_ROWS, NUM_UNITS = 1200, 300
# Logical CPUs of a node: enough for an engine with its tasks, and for a second engine when the other node is lost.
NUM_CPUS = max(2, hardware.detect().num_cpus) + 1


def node_environment():
    """Return the variables in deploy/ray.env, which the documentation recommends."""
    lines = (ROOT / "deploy" / "ray.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture
def cluster(tmp_path):
    with RayNodes(2, NUM_CPUS, tmp_path / "ray", environment=node_environment(), has_job_server=True) as nodes:
        yield nodes, RayJobs(nodes.jobs_environment)


@pytest.fixture
def bulk_job(tmp_path):
    """A run of the fake engine for about two minutes, with an engine on each node."""
    flags = (
        f"--engines 2 --rows-per-unit {NUM_ROWS // NUM_UNITS} --max-num-seqs 4 --heartbeat-s 0.5 --grace-s {GRACE_S}"
    )
    job = Job(folder=tmp_path / "job", num_rows=NUM_ROWS, is_fake=True, flags=tuple(flags.split()))
    job.write_corpus()
    return job


def wait_for(failure, condition, *, limit_s=180):
    """Wait until a condition holds, and return the seconds that this took. `failure` is the message of a timeout."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < limit_s, failure
        time.sleep(0.2)
    return time.monotonic() - started_at


def start_run(jobs, name, job, *flags, num_units=8):
    """Submit a run, and wait until it has committed `num_units` more units."""
    run = RunDirectory(job.output)
    num_before = len(run.committed()) if run.exists else 0
    jobs.submit("--no-wait", "--submission-id", name, *flags, "--", *job.command())
    took_s = wait_for(f"{name} commits nothing", lambda: run.exists and len(run.committed()) >= num_before + num_units)
    _log.info(f"{name}: {num_units} units after {took_s:.1f} s")
    return run


def require_complete(job):
    result = audit(job)
    assert result.problems == ()
    assert result.num_rows == job.num_rows


def test_stopped_job_can_be_continued(cluster, bulk_job):
    _, jobs = cluster
    run = start_run(jobs, "stopped", bulk_job)
    started_at = time.monotonic()
    jobs.call("stop", "stopped")
    _log.info(f"`ray job stop` returned after {time.monotonic() - started_at:.1f} s")
    assert "Job 'stopped' was stopped" in jobs.wait_until_ended("stopped")
    output = jobs.call("logs", "stopped").stdout
    rows = sum(pq.read_metadata(path).num_rows for path in run.data.glob("unit-*.parquet"))
    assert 0 < rows < bulk_job.num_rows
    assert f"stopped with {len(run.committed())} of {NUM_UNITS} units committed: stopped by a signal" in output
    assert f"{bulk_job.num_rows - rows} of {bulk_job.num_rows} rows are left" in output
    _log.info("\n".join(output.strip().splitlines()[-6:]))
    wait_for("engines are left", lambda: not processes.engine_processes(bulk_job.output))
    jobs.submit("--submission-id", "continued", "--", *bulk_job.command())
    require_complete(bulk_job)


def test_nodes_can_leave_and_join(cluster, bulk_job):
    nodes, jobs = cluster
    run = start_run(jobs, "moved", bulk_job)
    wait_for("a node has no engine", lambda: nodes.node_numbers_of(processes.actors(bulk_job.output)) == [0, 1])
    nodes.kill_node(0)
    num_committed = len(run.committed())
    took_s = wait_for("the other node commits nothing", lambda: len(run.committed()) >= num_committed + 4)
    _log.info(f"the other node: 4 units {took_s:.1f} s after the loss")
    nodes.add()
    nodes.kill_node(1)  # from now on, all engines are on the node that joined
    num_committed = len(run.committed())
    took_s = wait_for("the node that joined commits nothing", lambda: len(run.committed()) >= num_committed + 4)
    _log.info(f"the node that joined: 4 units {took_s:.1f} s after it was alone")
    assert nodes.node_numbers_of(processes.actors(bulk_job.output)) == [2]
    assert "Job 'moved' succeeded" in jobs.wait_until_ended("moved")
    require_complete(bulk_job)


def test_job_can_be_continued_after_the_head_is_lost(cluster, bulk_job):
    nodes, jobs = cluster
    run = start_run(jobs, "lost", bulk_job)
    nodes.replace_head()
    took_s = wait_for("nodes did not end with their head", lambda: not nodes.num_running())
    _log.info(f"the nodes had ended {took_s:.1f} s after the new head was up")
    assert "does not exist" in jobs.call("status", "lost").stderr
    nodes.replace_lost()
    assert len(run.committed()) < NUM_UNITS
    assert "succeeded" in jobs.submit("--submission-id", "again", "--", *bulk_job.command())
    require_complete(bulk_job)


def run_job(jobs, name, *arguments):
    """Run a job to its end, and return its output."""
    started_at = time.monotonic()
    job_output = jobs.submit("--submission-id", name, *arguments)
    assert "succeeded" in job_output, job_output[-3000:]
    _log.info(f"{name}: {time.monotonic() - started_at:.0f} s")
    return job_output


def write_config(path, settings):
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    return str(path)


def test_training_runs_on_the_nodes(cluster, embedded_target, write_jsonl, tmp_path):
    _, jobs = cluster
    output = tmp_path / "trained"
    settings = {
        "target": "smollm2-135m", "prompts": [str(write_jsonl([{"prompt": f"Count to {n}."} for n in range(16)]))],
        "output": str(output), "engines": 2, "max_num_seqs": 4, "max_response_tokens": 16, "enforce_eager": True,
        "max_document_tokens": 128, "epochs": 1, "num_layers": 1, "num_depths": 2, "draft_vocab_size": 512,
        "held_out": 0, "device": "cpu", "workers": 2,
    }  # fmt: skip
    config = write_config(tmp_path / "train.yaml", settings)
    job_output = run_job(jobs, "train", "--", sys.executable, "-m", "jobs.train", "--config", config)
    assert f"head: {output / 'head'}" in job_output
    assert (output / "head" / "model.safetensors").is_file()
    assert json.loads((output / "run.json").read_text())["documents"] == 16


def test_benchmark_runs_on_a_node_with_cpus(cluster, embedded_target, tmp_path):
    _, jobs = cluster
    output = tmp_path / "measured"
    settings = {
        "methods": ["none", "peagle"], "num_speculative_tokens": [3], "concurrency": [1], "repeats": 1, "rounds": 1,
        "limit": 2, "max_tokens": 16, "max_model_len": 512, "enforce_eager": True, "usd_per_hour": 1,
        "output": str(output),
    }  # fmt: skip
    config = write_config(tmp_path / "bench.yaml", settings)
    # Without this option, the driver and its engine would run on the head, which has no CPUs.
    command = ["--entrypoint-num-cpus", "1", "--", sys.executable, "-m", "jobs.bench", "--config", config]
    run_job(jobs, "bench", *command)
    none, drafted = json.loads((output / "report.json").read_text())["cells"]
    assert none["num_responses"] == drafted["num_responses"] == 2
    assert drafted["acceptance_length"] > 1
