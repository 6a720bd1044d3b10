"""`serve deploy` and `serve run` with deploy/serve.yaml on a separate Ray cluster, with the fake engine."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
import yaml

from peagle.ports import free_port
from tests.chaos.processes import descendants, kill

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 150

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * START_S + 60)]


@pytest.fixture
def environment():
    """An environment with the variables in deploy/ray.env, as the documentation recommends."""
    lines = (ROOT / "deploy" / "ray.env").read_text().splitlines()
    documented_variables = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**os.environ, **documented_variables, **token, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def addresses(environment, tmp_path):
    """Start a Ray node. Yields its address and the address of its dashboard."""
    port, dashboard_port = free_port(), free_port()
    command = [
        BIN / "ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=4",
        f"--dashboard-port={dashboard_port}",
        "--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}",
        "--object-store-memory=100000000", "--disable-usage-stats",
    ]  # fmt: skip
    log = tmp_path / "ray.log"
    with log.open("wb") as sink:
        node = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started." not in log.read_text(errors="replace"):
            if node.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(log.read_text(errors="replace")[-2000:])
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}"
    finally:
        kill(*descendants(node.pid), node.pid)
        node.wait()


@pytest.fixture
def config_and_url(tmp_path):
    """A copy of deploy/serve.yaml with another port and other models, and the URL of the API."""
    content, port = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text()), free_port()
    content["http_options"]["port"] = port
    (application,) = content["applications"]
    application["args"] |= {"state": str(tmp_path / "state"), "engine": "fake"}
    application["args"]["models"] = [{"name": "one", "max_replicas": 2}, {"name": "other", "drafter": "none"}]
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path, f"http://127.0.0.1:{port}/v1"


def num_output_tokens(url):
    """Wait for the endpoint, send a request to each model, and return the number of output tokens by model."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        deadline = time.monotonic() + START_S
        while True:
            try:
                models = [model.id for model in client.models.list().data]
                break
            except openai.APIError as error:  # connection refused, or no application yet
                if time.monotonic() > deadline:
                    raise AssertionError("the endpoint did not come up") from error
                time.sleep(0.5)
        params = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        return {
            model: client.chat.completions.create(model=model, **params).usage.completion_tokens for model in models
        }


def test_serve_deploy_starts_the_endpoint(addresses, environment, config_and_url):
    path, url = config_and_url
    command = [BIN / "serve", "deploy", path, "--address", addresses[1]]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert num_output_tokens(url) == {"one": 4, "other": 4}


def test_serve_run_stops_with_ctrl_c(addresses, environment, config_and_url, tmp_path):
    path, url = config_and_url
    log_file = tmp_path / "run.log"
    with log_file.open("wb") as sink:
        process = subprocess.Popen(
            [BIN / "serve", "run", path, "--address", addresses[0]], env=environment, cwd=ROOT, stdout=sink, stderr=sink
        )
    try:
        assert num_output_tokens(url) == {"one": 4, "other": 4}, log_file.read_text()[-2000:]
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0, log_file.read_text()[-2000:]
    finally:
        process.kill()
        process.wait()
