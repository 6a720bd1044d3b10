"""Tests of downloads through a fake of Ray Serve, which buffers everything immediately."""

import asyncio
import io

import pytest

from pipelines.online.batches.downloads import WINDOW_BYTES, Download, TransferLimit, attachment, span_of
from pipelines.online.batches.records import INPUT, StoredFile
from pipelines.online.errors import ApiError
from pipelines.online.serve.proxy import ProxyMiddleware

MIB = 1 << 20
DATA = bytes(range(256)) * (3 * WINDOW_BYTES // 256)
SCOPE = {"type": "http", "method": "GET", "path": "/prefix/v1/files/file-1/content", "headers": []}


class Source(io.BytesIO):
    """A file that counts the bytes read."""

    def __init__(self, data=DATA):
        super().__init__(data)
        self.num_bytes_read = 0

    def read(self, size=-1):
        piece = super().read(size)
        self.num_bytes_read += len(piece)
        return piece


class Client:
    """A client that stops reading after `num_messages` messages, and disconnects once `has_left` is set."""

    def __init__(self, num_messages=None):
        self.num_messages, self.messages = num_messages, []
        self.has_left = asyncio.Event()
        self._has_sent_request = False

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def status_and_headers(self):
        return self.messages[0]["status"], dict(self.messages[0]["headers"])

    async def send(self, message):
        if self.num_messages is not None and len(self.messages) == self.num_messages:
            await self.has_left.wait()
        self.messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.has_left.set()  # ASGI servers report a disconnect after the response

    async def receive(self):
        if self._has_sent_request:
            await self.has_left.wait()
            return {"type": "http.disconnect"}
        self._has_sent_request = True
        return {"type": "http.request", "body": b"", "more_body": False}


def make_file(data=DATA, owner="alice"):
    return StoredFile(
        id="file-1", owner=owner, filename="in.jsonl", purpose=INPUT, num_bytes=len(data), created_at=0.0, at=""
    )


@pytest.fixture
def transfers():
    return TransferLimit(max_bytes=4 * WINDOW_BYTES, max_bytes_per_key=2 * WINDOW_BYTES)


def serve(download):
    """Imitate Ray Serve, in which the application's `send` never waits for the client."""

    async def app(scope, receive, send):
        queue = asyncio.Queue()

        async def ingress():
            try:
                await download(scope, receive, queue.put)
            finally:
                await queue.put(None)

        task = asyncio.create_task(ingress())
        while (message := await queue.get()) is not None:
            await send(message)
        await task

    return app


async def wait_until_idle():
    for _ in range(50):
        await asyncio.sleep(0.005)


async def test_unread_download_is_limited_to_the_window(transfers):
    source, client = Source(), Client(num_messages=2)
    download = Download(make_file(), lambda: source, {}, transfers)
    task = asyncio.create_task(ProxyMiddleware(serve(download))(SCOPE, client.receive, client.send))
    await wait_until_idle()
    assert len(client.body) < source.num_bytes_read <= len(client.body) + WINDOW_BYTES
    with transfers.hold("alice", WINDOW_BYTES):  # the download reserves only a window, half of alice's limit
        pass
    client.has_left.set()
    await task
    assert source.closed
    # Nothing is reserved any more.
    with transfers.hold("alice", 2 * WINDOW_BYTES):
        pass


async def test_download_is_complete(transfers):
    client = Client()
    await ProxyMiddleware(serve(Download(make_file(), Source, {}, transfers)))(SCOPE, client.receive, client.send)
    assert client.body == DATA
    status, headers = client.status_and_headers
    assert (status, headers[b"content-length"]) == (200, str(len(DATA)).encode())


async def test_concurrent_downloads_are_limited_per_key_and_in_total(transfers):
    clients = [Client(num_messages=1) for _ in range(4)]
    owners = ["alice", "alice", "bob", "bob"]
    tasks = [
        asyncio.create_task(
            ProxyMiddleware(serve(Download(make_file(owner=owner), Source, {}, transfers)))(
                SCOPE, client.receive, client.send
            )
        )
        for owner, client in zip(owners, clients, strict=True)
    ]
    await wait_until_idle()
    for owner, status in (("alice", 429), ("carol", 503)):
        small = Download(make_file(DATA[:10], owner), Source, {}, transfers)
        with pytest.raises(ApiError) as error:
            await small(SCOPE, Client().receive, Client().send)
        assert (error.value.status, error.value.retry_after_s > 0) == (status, True)
    for client in clients:
        client.has_left.set()
    await asyncio.gather(*tasks)
    with transfers.hold("carol", 2 * WINDOW_BYTES):
        pass


async def test_without_acks_the_whole_download_is_reserved(transfers):
    """On a node without `deploy/ray.env`, Serve buffers everything and the proxy sends no acknowledgements."""
    data, client = DATA[: 2 * WINDOW_BYTES], Client(num_messages=1)
    download = Download(make_file(data), lambda: Source(data), {}, transfers)
    task = asyncio.create_task(serve(download)(SCOPE, client.receive, client.send))
    await wait_until_idle()
    with pytest.raises(ApiError, match="limit of concurrent uploads and downloads"):
        transfers.hold("alice", 1).__enter__()
    client.has_left.set()
    await task
    assert client.body == data
    with transfers.hold("alice", 2 * WINDOW_BYTES):
        pass
    with pytest.raises(ApiError) as error:
        await Download(make_file(), Source, {}, transfers)(SCOPE, Client().receive, Client().send)
    assert (error.value.status, error.value.code) == (400, "range_needed")
    range_client = Client()
    await serve(Download(make_file(), Source, {"range": f"bytes={MIB}-{3 * MIB - 1}"}, transfers))(
        SCOPE, range_client.receive, range_client.send
    )
    assert range_client.status_and_headers[0] == 206
    assert range_client.body == DATA[MIB : 3 * MIB]


async def test_clients_cannot_forge_acks(transfers):
    """An acknowledgement is a field of an ASGI message. Clients cannot set that field, because they only send bytes."""

    class ForgingClient(Client):
        async def receive(self):
            if self.has_left.is_set():
                return {"type": "http.disconnect"}
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b'{"peagle.ack": 99999999}', "more_body": True}

    source, client = Source(), ForgingClient(num_messages=2)
    download = Download(make_file(), lambda: source, {"peagle.ack": "99999999"}, transfers)
    task = asyncio.create_task(ProxyMiddleware(serve(download))(SCOPE, client.receive, client.send))
    await wait_until_idle()
    assert source.num_bytes_read <= len(client.body) + WINDOW_BYTES
    client.has_left.set()
    await task


@pytest.mark.parametrize(
    ("header", "first", "end"),
    [
        (None, 0, 100),
        ("bytes=0-", 0, 100),
        ("bytes=10-19", 10, 20),
        ("bytes= 90-1000", 90, 100),
        ("bytes=-1", 99, 100),
        ("bytes=-1000", 0, 100),
        ("bytes=5-4", 0, 100),
        ("bytes=0-1,5-6", 0, 100),
        ("lines=0-1", 0, 100),
        ("bytes=" + "9" * 5000 + "-", 0, 100),
    ],
)
def test_range_header_is_one_span_or_ignored(header, first, end):
    assert span_of(header, 100) == range(first, end)


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_range_outside_the_file_is_416(header):
    with pytest.raises(ApiError) as error:
        span_of(header, 100)
    assert error.value.status == 416


@pytest.mark.parametrize(("if_range", "status"), [('"file-1-100"', 206), ('"other"', 200)])
def test_range_applies_only_if_the_if_range_header_has_the_files_etag(transfers, if_range, status):
    headers = {"range": "bytes=0-9", "if-range": if_range}
    download = Download(make_file(DATA[:100]), Source, headers, transfers)
    assert download.status_code == status
    assert download.headers["etag"] == '"file-1-100"'
    assert download.headers.get("content-range") == ("bytes 0-9/100" if status == 206 else None)


def test_file_name_is_escaped_in_the_header():
    assert attachment('x"\r\nset-cookie: a=b\n/../é') == (
        "attachment; filename*=UTF-8''x%22%0D%0Aset-cookie%3A%20a%3Db%0A%2F..%2F%C3%A9"
    )
