import asyncio
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.online.errors import ApiError
from pipelines.online.gateway.bodies import (
    CREATE_BATCH_LIMITS,
    NUM_THREADS,
    REQUEST_LIMITS,
    BodyLimits,
    JsonBody,
    ParsePool,
    Upload,
    parse,
    read_body,
)
from pipelines.online.serve import flow
from pipelines.online.serve.flow import UPLOAD_WINDOW_BYTES
from pipelines.online.serve.proxy import ProxyMiddleware

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='ab,:[]{}"\\\n\u00e9', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text('a":,[', max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


def refusal_code(limits, body):
    try:
        limits.check(body)
    except ApiError as error:
        return error.code
    return None


def count_json(value):
    """Return the number of containers, of members of objects, and of values after a comma."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [count_json(item) for item in (value.values() if isinstance(value, dict) else value)]
    own = (1, len(value) if isinstance(value, dict) else 0, max(0, len(value) - 1))
    return tuple(sum(numbers) for numbers in zip(own, *inner, strict=True))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(value=JSON, is_ascii=st.booleans())
def test_json_inside_strings_is_not_counted(value, is_ascii):
    body, (containers, members, values) = json.dumps(value, ensure_ascii=is_ascii).encode(), count_json(value)
    assert refusal_code(BodyLimits(num_containers=containers, num_members=members, num_values=values), body) is None
    for num_containers, num_members, num_values in (
        (containers - 1, members, values),
        (containers, members - 1, values),
        (containers, members, values - 1),
    ):
        limits = BodyLimits(num_containers=num_containers, num_members=num_members, num_values=num_values)
        assert refusal_code(limits, body) == "too_many_values"


@pytest.mark.parametrize(
    "body",
    [b'"' * 2**20, b'"\\' * 2**19, b'"' + b'\\"' * 2**19, b'"' + b"[" * 2**20, b'{"a": "' + b"{[,:" * 2**18 + b'"}',
     b'"' + b',\\n' * 2**18],
    ids=range(6),
)  # fmt: skip
def test_long_strings_are_checked_fast(body):
    """An unterminated string is scanned only once."""
    started_at = time.process_time()
    assert refusal_code(REQUEST_LIMITS, body) is None
    assert time.process_time() - started_at < 5


def test_large_valid_bodies_pass():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
    steps = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}] * 1500
    assert refusal_code(REQUEST_LIMITS, json.dumps({"messages": steps}).encode()) is None
    assert refusal_code(REQUEST_LIMITS, json.dumps({"prompt": [32_000] * 149_000}).encode()) is None
    batch = {"input_file_id": "f", "endpoint": "e", "completion_window": "24h",
             "metadata": {str(number): "," * 500 for number in range(16)},
             "output_expires_after": {"anchor": "created_at", "seconds": 3600}}  # fmt: skip
    assert refusal_code(CREATE_BATCH_LIMITS, json.dumps(batch).encode()) is None


LARGE = 2**20


class BlockingWork:
    """Work that blocks until `may_finish` is set, and counts the running calls per key and their peak."""

    def __init__(self):
        self._lock, self.may_finish = threading.Lock(), threading.Event()
        self.running, self.peak, self.done = {}, 0, []

    def run(self, key):
        with self._lock:
            self.running[key] = self.running.get(key, 0) + 1
            assert self.running[key] == 1
            self.peak = max(self.peak, sum(self.running.values()))
        self.may_finish.wait(10)
        with self._lock:
            self.running[key] -= 1
            self.done.append(key)
        return key


async def test_pool_runs_one_body_per_key():
    parse_pool, work = ParsePool(), BlockingWork()
    tasks = [asyncio.create_task(parse_pool.run(key, LARGE, work.run, key)) for key in "aaabc"]
    await asyncio.sleep(0.1)
    assert work.peak == NUM_THREADS
    work.may_finish.set()
    assert await asyncio.gather(*tasks) == list("aaabc")
    assert work.peak == NUM_THREADS
    assert parse_pool._locks == {}


async def test_cancelled_request_blocks_its_key_until_its_thread_ends():
    parse_pool, work = ParsePool(), BlockingWork()
    cancelled = [asyncio.create_task(parse_pool.run("a", LARGE, work.run, "a")) for _ in range(5)]
    await asyncio.sleep(0.1)
    for task in cancelled:
        task.cancel()
    other = asyncio.create_task(parse_pool.run("a", LARGE, work.run, "a"))
    await asyncio.sleep(0.1)
    assert work.running == {"a": 1}
    work.may_finish.set()
    assert await other == "a"
    assert work.done == ["a", "a"]
    assert all(task.cancelled() for task in cancelled)


async def test_short_bodies_run_immediately_and_errors_propagate():
    parse_pool = ParsePool()
    assert await parse_pool.run("a", 100, threading.get_ident) == threading.get_ident()
    assert await parse_pool.run("a", LARGE, threading.get_ident) != threading.get_ident()
    for size in (100, LARGE):
        with pytest.raises(ValueError, match="invalid literal"):
            await parse_pool.run("a", size, int, "x")
    assert parse_pool._locks == {}


async def test_parsed_values_are_validated_in_a_thread_and_released():
    for num_bytes, uses_thread in ((100, False), (LARGE, True)):
        body = JsonBody(values=["x"], num_bytes=num_bytes, key="a", parse_pool=ParsePool())
        values, thread = await body.validate_in_thread(lambda values: (values, threading.get_ident()))
        assert (values, thread != threading.get_ident()) == (["x"], uses_thread)
        assert body.values is None


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"", b"\xff"])
def test_invalid_json_is_400(body):
    with pytest.raises(ApiError) as error:
        parse(body)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


PIECE_BYTES, NUM_PIECES = 1 << 17, 100


async def fail_on_send(message):
    raise AssertionError(f"unexpected message {message}")


def read_upload(pieces, *, max_bytes=10, piece_timeout_s=5.0, timeout_s=5.0, delay_s=0.0):
    async def receive():
        await asyncio.sleep(delay_s)
        return pieces.pop(0)

    async def run():
        upload, body = Upload(receive, fail_on_send, max_bytes, piece_timeout_s, timeout_s), b""
        while True:
            message = await upload()
            body += message.get("body", b"")
            if not message.get("more_body"):
                return body, upload

    return asyncio.run(run())


def piece(body, *, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize("limits", [{"piece_timeout_s": 0.01}, {"timeout_s": 0.05}])
def test_slow_body_times_out(limits):
    with pytest.raises(ApiError) as error:
        read_upload([piece(b"x") for _ in range(20)], max_bytes=100, delay_s=0.02, **limits)
    assert error.value.status == 408


def test_incomplete_body_is_400():
    pieces = [piece(b"{"), {"type": "http.disconnect"}]

    async def receive():
        return pieces.pop(0)

    with pytest.raises(ApiError) as error:
        asyncio.run(read_body(receive, fail_on_send, max_bytes=10, timeout_s=5))
    assert (error.value.status, error.value.code) == (400, "incomplete_body")


def test_no_timeout_after_the_body():
    pieces = [piece(b"x", more=False), {"type": "http.disconnect"}]
    _, upload = read_upload(pieces, timeout_s=0.5)
    assert asyncio.run(upload())["type"] == "http.disconnect"


def messages_through_proxy(app, client, path, method="POST"):
    """Return the messages that a client gets for a request. Each call of `client` returns a piece of the body."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    asyncio.run(asyncio.wait_for(ProxyMiddleware(app)(scope, client, send), 10))
    return sent


def test_upload_window_limits_unread_bytes():
    """Ray Serve reads everything immediately, so the proxy must stop reading from the client."""
    num_sent, max_in_flight = 0, 0

    async def client():
        nonlocal num_sent
        await asyncio.sleep(0)
        num_sent += 1
        return piece(b"x" * PIECE_BYTES, more=num_sent < NUM_PIECES)

    async def serve(scope, receive, send):
        arrived = asyncio.Queue()

        async def read_all():
            while (message := await receive()).get("more_body"):
                await arrived.put(message)
            await arrived.put(message)

        read_task = asyncio.create_task(read_all())
        upload = Upload(arrived.get, send, NUM_PIECES * PIECE_BYTES, 5, 5)
        nonlocal max_in_flight
        num_read = 0
        while not upload.is_whole:
            await asyncio.sleep(0.001)
            await upload()
            num_read += 1
            max_in_flight = max(max_in_flight, num_sent - num_read)
        await read_task
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    sent = messages_through_proxy(serve, client, "/v1/files")
    assert num_sent == NUM_PIECES
    assert max_in_flight * PIECE_BYTES <= UPLOAD_WINDOW_BYTES + PIECE_BYTES
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/cost"), ("DELETE", "/v1/files/file-1"), ("POST", "/v1/batches/batch_1/cancel"), ("GET", "/health"),
     ("POST", "/v1/chat/completions"), ("POST", "/v1/batches"), ("GET", "/v1/files")],
)  # fmt: skip
def test_unread_body_is_limited_to_a_window(method, path):
    """Without the limit, Ray Serve would read gigabytes until the answer ends, even from a client without a key."""
    num_sent = 0

    async def client():
        nonlocal num_sent
        await asyncio.sleep(0)
        num_sent += 1
        return piece(b"x" * PIECE_BYTES)

    async def serve(scope, receive, send):
        async def read_all():
            while True:
                await receive()

        read_task = asyncio.create_task(read_all())
        await asyncio.sleep(0.2)
        read_task.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    messages_through_proxy(serve, client, path, method)
    assert num_sent * PIECE_BYTES <= UPLOAD_WINDOW_BYTES


def test_application_without_acks_receives_its_body(monkeypatch):
    monkeypatch.setattr(flow, "_PATIENCE_S", 0.02)
    pieces = [piece(b"x" * PIECE_BYTES, more=number + 1 < NUM_PIECES) for number in range(NUM_PIECES)]

    async def client():
        return pieces.pop(0)

    async def other_app(scope, receive, send):
        num_bytes, more = 0, True
        while more:
            message = await receive()
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
        assert num_bytes == NUM_PIECES * PIECE_BYTES

    messages_through_proxy(other_app, client, "/other/v1/files")
    assert not pieces


def test_refused_upload_is_not_throttled():
    num_sent = 0

    async def client():
        nonlocal num_sent
        num_sent += 1
        return piece(b"x" * PIECE_BYTES, more=num_sent < NUM_PIECES)

    async def serve(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
        while (await receive())["more_body"]:
            pass

    messages_through_proxy(serve, client, "/prefix/v1/files")
    assert num_sent == NUM_PIECES
