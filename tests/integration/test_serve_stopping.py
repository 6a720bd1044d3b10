"""`peagle serve` is asked to stop while it answers; the fake engine on real Ray Serve."""

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
def served(peagle, tmp_path):
    """Start an endpoint; the process, and its address once it is up."""

    def start(drain_s):
        port = free_port()
        process = peagle(
            *("serve", "--port", port, "--state", tmp_path / "state", "--engine", "fake"),
            *("--fake", json.dumps({"token_s": TOKEN_S}), "--usd-per-hour", 1, "--drain-s", drain_s),
        )
        for line in process.stdout:
            if line.startswith("http://"):
                return process, line.strip()
        raise AssertionError("it did not start")

    return start


def lines_of(answer):
    """What a stream says, line by line, without the empty ones."""
    return (line for line in answer.iter_lines() if line)


@contextlib.contextmanager
def stopped_while_it_answers(process, url):
    """Ask for a stream, and the endpoint to stop once it has begun: its first line, and those to come."""
    body = {"model": "fake", "messages": QUESTION, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as answer:
        lines = lines_of(answer)
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        yield first, lines


def test_a_stream_under_way_gets_to_its_end_and_nothing_new_is_let_in(served):
    process, url = served(drain_s=60)
    with stopped_while_it_answers(process, url) as (first, lines):
        until = time.monotonic() + 5
        while (refused := httpx.get(f"{url}/models")).status_code == 200:
            assert time.monotonic() < until
            time.sleep(0.1)
        whole = [first, *lines]
    assert refused.status_code == 503  # which OpenAI's client asks again, after what Retry-After says
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "overloaded"
    assert whole[-1] == "data: [DONE]"
    words = [choice["delta"]["content"] for line in whole[:-1] for choice in json.loads(line[6:])["choices"]]
    assert len("".join(words).split()) == NUM_TOKENS
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    # As it is: without a line that Ray prints of its own processes.
    assert said == "stopping: running requests may finish; repeat to stop immediately\n"


def test_what_takes_longer_than_it_may_ends_with_an_error_event(served):
    process, url = served(drain_s=3)
    with stopped_while_it_answers(process, url) as (_, lines):
        *_, last = lines
    assert json.loads(last[6:])["error"]["type"] == "overloaded_error"
    assert process.wait(60) == 0


def test_a_second_signal_ends_it_at_once(served):
    process, url = served(drain_s=60)
    with stopped_while_it_answers(process, url):
        for line in process.stdout:
            if line.startswith("stopping"):
                break
        time.sleep(1.1)  # what comes sooner is the same wish
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 3
