import asyncio

import pytest

from pipelines.online import flow
from pipelines.online.errors import ApiError
from pipelines.online.flow import UPLOAD_WINDOW_BYTES
from pipelines.online.front import Front
from pipelines.online.uploads import Upload

PIECE_BYTES, NUM_PIECES = 1 << 17, 100


async def nobody(message):
    raise AssertionError(f"nobody waits for {message}")


def read(pieces, *, max_bytes=10, piece_timeout_s=5.0, timeout_s=5.0, delay_s=0.0):
    async def receive():
        await asyncio.sleep(delay_s)
        return pieces.pop(0)

    async def run():
        upload, body = Upload(receive, nobody, max_bytes, piece_timeout_s, timeout_s), b""
        while True:
            message = await upload()
            body += message.get("body", b"")
            if not message.get("more_body"):
                return body, upload

    return asyncio.run(run())


def piece(body, *, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_within_its_limits_is_passed_on():
    assert read([piece(b"x" * 6), piece(b"y" * 4, more=False)])[0] == b"xxxxxxyyyy"


def test_a_body_is_cut_at_the_limit_whatever_it_says_of_itself():
    with pytest.raises(ApiError) as caught:
        read([piece(b"x" * 6), piece(b"y" * 5), piece(b"", more=False)])
    assert caught.value.status == 413


@pytest.mark.parametrize("limits", [{"piece_timeout_s": 0.01}, {"timeout_s": 0.05}])
def test_a_body_that_trickles_in_is_given_up(limits):
    with pytest.raises(ApiError) as caught:
        read([piece(b"x") for _ in range(20)], max_bytes=100, delay_s=0.02, **limits)
    assert caught.value.status == 408


def test_what_the_client_does_later_has_no_limit():
    pieces = [piece(b"x", more=False), {"type": "http.disconnect"}]
    _, upload = read(pieces, timeout_s=0.5)
    assert asyncio.run(upload())["type"] == "http.disconnect"


def test_of_a_body_no_more_is_under_way_than_the_ingress_can_take():
    """Serve takes all that comes from the client, at once: the rest has to stay with the client."""
    num_sent, most_under_way = 0, 0

    async def client():
        nonlocal num_sent
        await asyncio.sleep(0)
        num_sent += 1
        return piece(b"x" * PIECE_BYTES, more=num_sent < NUM_PIECES)

    async def serve(scope, receive, send):
        arrived = asyncio.Queue()

        async def take_all():
            while (message := await receive()).get("more_body"):
                await arrived.put(message)
            await arrived.put(message)

        taking = asyncio.create_task(take_all())
        upload = Upload(arrived.get, send, NUM_PIECES * PIECE_BYTES, 5, 5)
        nonlocal most_under_way
        num_read = 0
        while not upload.is_whole:
            await asyncio.sleep(0.001)
            await upload()
            num_read += 1
            most_under_way = max(most_under_way, num_sent - num_read)
        await taking
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": []}
    asyncio.run(Front(serve)(scope, client, send))
    assert num_sent == NUM_PIECES
    assert most_under_way * PIECE_BYTES <= UPLOAD_WINDOW_BYTES + PIECE_BYTES
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/cost"), ("DELETE", "/v1/files/file-1"), ("POST", "/v1/batches/batch_1/cancel"), ("GET", "/health"),
     ("POST", "/v1/chat/completions"), ("POST", "/v1/batches"), ("GET", "/v1/files")],
)  # fmt: skip
def test_of_a_body_that_nobody_reads_no_more_than_a_window_arrives(method, path):
    """Serve takes it all, for as long as the answer takes: it was gigabytes, of a client without a key too."""
    num_sent = 0

    async def client():
        nonlocal num_sent
        await asyncio.sleep(0)
        num_sent += 1
        return piece(b"x" * PIECE_BYTES)

    async def serve(scope, receive, send):
        async def take_all():
            while True:
                await receive()

        taking = asyncio.create_task(take_all())
        await asyncio.sleep(0.2)
        taking.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def send(message):
        pass

    asyncio.run(Front(serve)({"type": "http", "method": method, "path": path, "headers": []}, client, send))
    assert num_sent * PIECE_BYTES <= UPLOAD_WINDOW_BYTES


def test_an_application_that_tells_nothing_gets_its_bodies(monkeypatch):
    monkeypatch.setattr(flow, "_PATIENCE_S", 0.02)
    pieces = [piece(b"x" * PIECE_BYTES, more=number + 1 < NUM_PIECES) for number in range(NUM_PIECES)]

    async def client():
        return pieces.pop(0)

    async def another(scope, receive, send):
        num_bytes, more = 0, True
        while more:
            message = await receive()
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
        assert num_bytes == NUM_PIECES * PIECE_BYTES

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/other/v1/files", "headers": []}
    asyncio.run(asyncio.wait_for(Front(another)(scope, client, send), 5))
    assert not pieces


def test_a_body_that_is_refused_is_not_held_up():
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

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/prefix/v1/files", "headers": []}
    asyncio.run(asyncio.wait_for(Front(serve)(scope, client, send), 10))
    assert num_sent == NUM_PIECES
