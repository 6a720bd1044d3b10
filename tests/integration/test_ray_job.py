"""`ray job submit` of a run and a training to a local cluster, directly and as KubeRay does."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jobs.deploying import read_workload
from peagle.deploy.kuberay import MAX_NAME_LENGTH, KubeRayOptions, PodOptions, manifests
from peagle.ports import free_port
from peagle.runs.directory import RunDirectory
from tests.chaos import processes
from tests.ray_jobs import RAY, ROOT, RayJobs

# Ray 2.60 requires a token by default. Head, client and job need the same token.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

pytestmark = pytest.mark.timeout(300)


def is_up(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True  # the server refuses the request without a token, so it is up
    except OSError:
        return False


@pytest.fixture(scope="module")
def job_server():
    """The job server of a separate cluster.

    Its ports are not Ray's defaults, because the cluster of the `ray_cluster` fixture might use those. It has its own
    temporary folder, because Ray sets RAY_ADDRESS of a job to the cluster that was started last in that folder.
    """
    port, dashboard_port, agent_port = free_port(), free_port(), free_port()
    folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # paths of sockets must be short
    head = subprocess.Popen(
        [RAY, "start", "--head", "--block", f"--port={port}", "--num-cpus=4", "--include-dashboard=true",
         f"--dashboard-port={dashboard_port}", f"--dashboard-agent-listen-port={agent_port}", "--disable-usage-stats",
         f"--temp-dir={folder.name}"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{dashboard_port}"
    deadline = time.monotonic() + 120
    while not is_up(f"{address}/api/version"):
        assert head.poll() is None, head.stdout.read()
        assert time.monotonic() < deadline, "the job server did not come up"
        time.sleep(0.5)
    yield RayJobs({**ENVIRONMENT, "RAY_API_SERVER_ADDRESS": address})
    processes.kill(*processes.descendants(head.pid), head.pid)  # Ray needs half a minute to stop gracefully
    head.communicate(timeout=60)
    folder.cleanup()


def submit_module(job_server, module, config):
    return job_server.submit("--", sys.executable, "-m", module, "--config", str(config))


def test_submitted_job_runs_on_the_cluster(job_server, write_jsonl, tmp_path):
    corpus = write_jsonl([{"prompt": str(n)} for n in range(9)])
    config, output = tmp_path / "job.yaml", tmp_path / "run"
    config.write_text(f"engine: fake\ninput: {corpus}\noutput: {output}\nrows_per_unit: 2\n")
    job_output = submit_module(job_server, "jobs.generate", config)
    assert "9 of 9, 0 failed" in job_output, job_output[-3000:]
    run = RunDirectory(output)
    assert run.committed() == {0, 1, 2, 3, 4}
    assert len(run.sessions()) == 1


def test_submitted_training_runs_on_the_cluster(job_server, chat_target, write_jsonl, tmp_path):
    rows = [{"prompt": f"count to {n}", "response": "1 2 3 " * (n % 7 + 2)} for n in range(12)]
    config, output = tmp_path / "train.yaml", tmp_path / "head"
    settings = {
        "target": chat_target, "prompts": write_jsonl(rows), "responses": "given", "output": output, "epochs": 1,
        "num_depths": 3, "draft_vocab_size": 40, "held_out": 0, "device": "cpu",
    }  # fmt: skip
    config.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    job_output = submit_module(job_server, "jobs.train", config)
    assert f"head: {output / 'head'}" in job_output
    assert json.loads((output / "run.json").read_text())["documents"] == 12


@pytest.fixture
def submit_like_kuberay(job_server, write_jsonl, tmp_path):
    """Return a function that submits a run like KubeRay, with the files of `peagle deploy kuberay` in the head's pod.

    The function returns a function that waits until the job ends, and returns its output.
    """
    options = PodOptions(image="i", claim="c", env_secrets=[], service_account=None, token_secret="t")
    corpus = write_jsonl([{"prompt": str(n)} for n in range(40)])
    path = tmp_path / "run.yaml"
    # `peagle deploy kuberay` refuses local paths, so the real ones are in job.yaml below.
    path.write_text("input: s3://b/in\noutput: s3://b/out\ninstance_type: c7a.large\n")
    config, _ = manifests(
        read_workload(path, None, max_name_length=MAX_NAME_LENGTH), KubeRayOptions(pods=options, env={})
    )
    replacements = {  # from the pod to this machine
        "/etc/peagle": tmp_path,
        "/tmp/peagle.pid": tmp_path / "pid",
        "http://127.0.0.1:8265": job_server.environment["RAY_API_SERVER_ADDRESS"],
    }

    def submit(name, **run_options):
        for script in ("run.sh", "stop.sh"):
            # KubeRay's cluster has one job with a fixed name, but this cluster has several.
            text = config["data"][script].replace("peagle-run", name)
            for in_pod, on_this_machine in replacements.items():
                text = text.replace(in_pod, str(on_this_machine))
            (tmp_path / script).write_text(text)
        values = {"engine": "fake", "input": corpus, "output": tmp_path / "run", "rows_per_unit": 1, **run_options}
        (tmp_path / "job.yaml").write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
        variables = {"PATH": f"{Path(RAY).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        environment = ["--runtime-env-json", json.dumps({"env_vars": variables})]
        job_server.submit("--no-wait", "--submission-id", name, *environment, "--", "sh", str(tmp_path / "run.sh"))
        return lambda: job_server.wait_until_ended(name)

    return submit


def test_bad_configuration_stops_the_kuberay_job(submit_like_kuberay, tmp_path):
    assert "Job 'bad' was stopped" in submit_like_kuberay("bad", temprature=1)()
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_run_of_an_evicted_pod_commits_units_and_is_retried(submit_like_kuberay, tmp_path):
    wait_until_ended = submit_like_kuberay("evicted", fake='{"token_s": 0.05}', max_num_seqs=1, max_tokens=10)
    run = RunDirectory(tmp_path / "run")
    while not (run.exists and run.committed()):
        time.sleep(0.5)
    subprocess.run(["sh", str(tmp_path / "stop.sh")], check=True, timeout=60)
    message = wait_until_ended()
    assert "Job 'evicted' failed" in message
    assert "exit code 3" in message
    assert 0 < len(run.committed()) < 40
    assert "Job 'retried' succeeded" in submit_like_kuberay("retried", max_num_seqs=1, max_tokens=10)()
    assert len(run.committed()) == 40
