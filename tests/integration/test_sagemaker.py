"""SageMaker's contract for containers: `peagle serve` is configured by variables, and has /ping and /invocations."""

import contextlib
import json
import logging
import signal
import socket
import time
from types import SimpleNamespace

import httpx
import pytest

from peagle.economics.ledger import RequestReader
from peagle.ports import free_port

_log = logging.getLogger(__name__)  # `-rP --log-level=INFO` shows the stopping time
START_S = 240  # timeout
# SageMaker's limits for a health check, and for stopping after SIGTERM.
MAX_PING_S = 2.0
MAX_STOP_S = 30.0
# The request in "Parallelize speculative decoding with P-EAGLE on Amazon SageMaker AI" (AWS blog, 2026-06-16).
REQUEST = {
    "model": "qwen3-coder",
    "messages": [{"role": "user", "content": "What is deep learning?"}],
    "max_tokens": 512,
    "temperature": 0.3,
}
TOKEN_S = 0.1
# The headers that SageMaker forwards; clients cannot set `Host`.
HEADERS = {"host": "model.aws.local:8080", "content-type": "application/json"}

pytestmark = pytest.mark.timeout(2 * START_S + 120)


@pytest.fixture
def start_container(peagle, tmp_path, monkeypatch):
    """Return a function that starts `peagle serve` with environment variables, as the container image does."""

    def run(variables):
        port = free_port()
        options = {"PORT": port, "STATE": tmp_path / "state", "USD_PER_HOUR": 1, "SAGEMAKER": "true"}
        for name, value in {**{f"PEAGLE_{name}": value for name, value in options.items()}, **variables}.items():
            monkeypatch.setenv(name, str(value))
        process = peagle("serve")
        return process, httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=START_S)

    return run


def ping(client):
    """Return the status of the container's health check, or None if it does not listen yet."""
    try:
        answer = client.get("/ping")
    except httpx.TransportError:
        return None
    assert answer.status_code != 200 or answer.content == b""
    return answer.status_code


def measure_ping_s(client):
    """Return the duration of a health check in seconds."""
    started_at = time.monotonic()
    assert ping(client) == 200
    return time.monotonic() - started_at


def wait_until_healthy(process, client):
    statuses = set()
    until = time.monotonic() + START_S
    while (status := ping(client)) != 200:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < until, statuses
        statuses.add(status)
        time.sleep(0.2)


def invoke(client, body, **attributes):
    attribute_header = ",".join(f"{name}={value}" for name, value in attributes.items())
    headers = {"x-amzn-sagemaker-custom-attributes": attribute_header} if attribute_header else {}
    return client.post("/invocations", content=json.dumps(body), headers=headers)


def stop_during_stream(process, client):
    """Stop the container during a stream. Return the duration, the exit code and the stream's last event."""
    with client.stream("POST", "/invocations", json=REQUEST | {"stream": True, "ignore_eos": True}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        started_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        *_, last_event = lines
    exit_code = process.wait(2 * MAX_STOP_S)
    return SimpleNamespace(duration_s=time.monotonic() - started_at, exit_code=exit_code, last_event=last_event)


def test_container_contract(start_container, tmp_path):
    fake_options = {"token_s": TOKEN_S, "start_s": 3, "die_on": "poison"}
    process, client = start_container(
        {"SM_VLLM_MODEL": "any", "SM_VLLM_SERVED_MODEL_NAME": "qwen3-coder", "PEAGLE_ENGINE": "fake"}
        | {"PEAGLE_FAKE": json.dumps(fake_options), "SM_VLLM_MAX_MODEL_LEN": "1024", "PEAGLE_DRAIN_S": "5"}
    )
    with client:
        wait_until_healthy(process, client)
        short = REQUEST | {"max_tokens": 8}
        chat = invoke(client, short).raise_for_status()
        assert (chat.json()["object"], chat.json()["model"]) == ("chat.completion", "qwen3-coder")
        assert chat.headers["x-peagle-model"] == "qwen3-coder"
        prompt = {"prompt": "def add(a, b):", "max_tokens": 4}
        assert invoke(client, prompt).json()["object"] == "text_completion"
        assert invoke(client, prompt, route="/v1/completions").json()["object"] == "text_completion"
        assert invoke(client, prompt, route="/v1/chat/completions").status_code == 400
        events = invoke(client, short | {"stream": True}).text
        assert (events.startswith("data: "), events.endswith("data: [DONE]\n\n")) == (True, True)
        assert invoke(client, {}, route="/v1/cost", method="GET").json()["total"]["num_requests"] == 4
        # The shortest of five, because other processes use the machine, too.
        assert min(measure_ping_s(client) for _ in range(5)) < MAX_PING_S
        check_engine_crash(process, client)
        stop = stop_during_stream(process, client)
    assert json.loads(stop.last_event.removeprefix("data: "))["error"]["type"] == "overloaded_error"  # drain_s expired
    assert (stop.exit_code, stop.duration_s < MAX_STOP_S) == (0, True), stop
    requests = RequestReader(tmp_path / "state" / "ledger").new()
    assert [request.model for request in requests] == ["qwen3-coder"] * len(requests)
    assert sum(request.outcome == "ok" for request in requests) == 5  # four before the crash, and one after it


def check_engine_crash(process, client):
    """The health check fails until another engine is running."""
    refused = invoke(client, {"prompt": "poison", "max_tokens": 1})
    assert refused.status_code == 503
    until = time.monotonic() + 60
    while ping(client) == 200:
        assert time.monotonic() < until, "the health check passes although the engine is dead"
        time.sleep(0.1)
    wait_until_healthy(process, client)
    invoke(client, REQUEST | {"max_tokens": 1}).raise_for_status()


def send(connection, address, body):
    """Send a request without reading the answer."""
    data = json.dumps(body).encode()
    connection.connect(address)
    connection.sendall(b"POST /invocations HTTP/1.1\r\nhost: any\r\ncontent-type: application/json\r\n")
    connection.sendall(f"content-length: {len(data)}\r\n\r\n".encode() + data)


@pytest.mark.soak
def test_container_stops_in_time_despite_hanging_clients(start_container):
    """`drain_s` is at its maximum. One client does not read, one sends nothing, and one waits for a hanging engine."""
    process, client = start_container(
        {
            "SM_VLLM_MODEL": "any",
            "PEAGLE_ENGINE": "fake",
            "SM_VLLM_MAX_MODEL_LEN": "8192",
            "SM_VLLM_MAX_NUM_SEQS": "32",
            "PEAGLE_DRAIN_S": "20",
        }
        | {"PEAGLE_FAKE": json.dumps({"token_s": 0.0002, "hang_on": "silence"})}
    )
    with client, contextlib.ExitStack() as connections:
        wait_until_healthy(process, client)
        address = (client.base_url.host, client.base_url.port)
        connections.enter_context(socket.create_connection(address))
        non_reader = connections.enter_context(socket.socket())
        non_reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send(non_reader, address, {"prompt": "count", "max_tokens": 8000, "n": 16, "ignore_eos": True, "stream": True})
        time.sleep(15)  # until all buffers between the engine and the client are full
        unanswered = connections.enter_context(socket.socket())
        send(unanswered, address, {"prompt": "silence", "max_tokens": 8, "stream": True})
        time.sleep(2)  # until the engine has the request, which it never answers
        started_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * MAX_STOP_S) == 0
        duration_s = time.monotonic() - started_at
    _log.info(f"the container ended {duration_s:.1f} s after SIGTERM")
    assert duration_s < MAX_STOP_S


@pytest.mark.soak
def test_jumpstart_variables_start_the_embedded_model(start_container, embedded_target, shipped_head, tmp_path):
    speculation = {
        "model": str(shipped_head),  # /opt/ml/additional-model-data-sources/eagle in the container
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    process, client = start_container(
        {"SM_VLLM_SPECULATIVE_CONFIG": json.dumps(speculation), "SM_VLLM_SERVED_MODEL_NAME": "qwen3-coder"}
        | {"SM_VLLM_MODEL": embedded_target, "SM_VLLM_MAX_MODEL_LEN": "1024", "SM_VLLM_MAX_NUM_SEQS": "2"}
        | {"SM_VLLM_ENFORCE_EAGER": "true", "SM_VLLM_BLOCK_SIZE": "32", "PEAGLE_VERIFY": "all"}
    )
    with client:
        wait_until_healthy(process, client)
        answer = invoke(client, REQUEST).raise_for_status()
        assert answer.headers["x-peagle-num-speculative-tokens"] == "3"
        assert float(answer.headers["x-peagle-acceptance-length"]) > 1
        assert answer.json()["choices"][0]["message"]["content"]
        assert "Paris" in invoke(client, {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).text
        stop = stop_during_stream(process, client)
    assert (stop.exit_code, stop.duration_s < MAX_STOP_S) == (0, True), stop
    answered, _, *interrupted = RequestReader(tmp_path / "state" / "ledger").new()
    assert (answered.outcome, answered.usage.speculation.num_drafts > 0) == ("ok", True)
    # After `drain_s`, Ray Serve kills an engine with unfinished requests, so the stream might have no record.
    assert [record.outcome for record in interrupted] in ([], ["ok"], ["cut"])
