"""`peagle serve` with the fake engine on real Ray Serve is stopped during a stream."""

import contextlib
import json
import signal
import time

import httpx
import pytest

from peagle.ports import free_port

NUM_TOKENS, TOKEN_S = 40, 0.2
QUESTION = [{"role": "user", "content": "?"}]

pytestmark = [pytest.mark.timeout(300), pytest.mark.soak]


@pytest.fixture
def start_endpoint(peagle, tmp_path):
    """Return a function that starts an endpoint and returns its process and address."""

    def start(drain_s):
        port = free_port()
        process = peagle(
            *("serve", "--port", port, "--state", tmp_path / "state", "--engine", "fake"),
            *("--fake", json.dumps({"token_s": TOKEN_S}), "--usd-per-hour", 1, "--drain-s", drain_s),
        )
        for line in process.stdout:
            if line.startswith("http://"):
                return process, line.strip()
        raise AssertionError("the endpoint did not start")

    return start


def lines_of(answer):
    """Return the non-empty lines of a stream."""
    return (line for line in answer.iter_lines() if line)


@contextlib.contextmanager
def stop_during_stream(process, url):
    """Start a stream, and stop the endpoint after the first line. Yield that line and an iterator of the others."""
    body = {"model": "fake", "messages": QUESTION, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as answer:
        lines = lines_of(answer)
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        yield first, lines


def test_running_stream_finishes_during_shutdown(start_endpoint):
    process, url = start_endpoint(drain_s=60)
    with stop_during_stream(process, url) as (first, lines):
        deadline = time.monotonic() + 5
        while (refused := httpx.get(f"{url}/models")).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        all_lines = [first, *lines]
    assert refused.status_code == 503  # OpenAI's client retries it after the time in Retry-After
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "overloaded"
    assert all_lines[-1] == "data: [DONE]"
    texts = [choice["delta"]["content"] for line in all_lines[:-1] for choice in json.loads(line[6:])["choices"]]
    assert len("".join(texts).split()) == NUM_TOKENS
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    # Ray's own output must not appear.
    assert stdout == "stopping: waiting for running requests; repeat to stop immediately\n"


def test_stream_beyond_drain_s_ends_with_an_error_event(start_endpoint):
    process, url = start_endpoint(drain_s=3)
    with stop_during_stream(process, url) as (_, lines):
        *_, last = lines
    assert json.loads(last[6:])["error"]["type"] == "overloaded_error"
    assert process.wait(60) == 0


def test_second_signal_stops_immediately(start_endpoint):
    process, url = start_endpoint(drain_s=60)
    with stop_during_stream(process, url):
        for line in process.stdout:
            if line.startswith("stopping"):
                break
        time.sleep(1.1)  # signals within a second count as one
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 3
