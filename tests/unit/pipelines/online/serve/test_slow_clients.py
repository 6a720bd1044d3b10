"""Tests with raw sockets and real uvicorn servers, with both HTTP implementations."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipelines.online.serve import proxy, slow_clients

LIMIT_S = 0.5
KEEP_ALIVE_S = 60
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
READ_BYTES = 256 * 1024  # the size of a server's read buffer
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def app(scope, receive, send):
    """Answer after the body, or immediately if the path is /early."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        return
    while scope["path"] != "/early" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
    monkeypatch.setattr(slow_clients, "HEADERS_LIMIT_S", LIMIT_S)
    # Setting the class to itself makes monkeypatch restore it after the test.
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)


@contextlib.contextmanager
def run_server(protocol, app):
    """Run a server with this protocol."""
    config = uvicorn.Config(
        app, port=0, http=protocol, ws="websockets-sansio", log_level="critical", lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def connected_to(protocol):
    """Connect to a new server with this protocol."""
    with (
        run_server(protocol, app) as server,
        socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=10) as client,
    ):
        yield client


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol])
def client(request):
    with connected_to(slow_clients.with_limits(request.param)) as client:
        yield client


def read_to_end(client):
    """Return the data until the server closes the connection, and the seconds that this took."""
    started_at, data = time.monotonic(), b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65_536):
            data += piece
    return data, time.monotonic() - started_at


def is_open(client):
    client.settimeout(3 * LIMIT_S)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True


def trickle(client, data):
    """Send the data slowly, byte by byte. Return the number of bytes sent before the server reacted."""
    client.settimeout(LIMIT_S / 10)
    for index in range(len(data)):
        with contextlib.suppress(TimeoutError):
            if client.recv(1, socket.MSG_PEEK) is not None:
                return index
        client.sendall(data[index : index + 1])
    return len(data)


def read_answer(client):
    output = client.recv(65_536)
    while not output.endswith(b"ok"):
        output += client.recv(65_536)
    return output


def assert_is_408(message):
    head, _, body = message.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_silent_connection_is_closed(client):
    data, took_s = read_to_end(client)
    assert data == b""
    assert 0.5 * LIMIT_S < took_s < 8 * LIMIT_S


def test_slow_headers_get_408(client):
    assert trickle(client, HEAD) < len(HEAD)
    client.settimeout(10)
    data, _ = read_to_end(client)
    assert_is_408(data)


@pytest.mark.parametrize("incomplete", [HEAD, b"G"])
def test_slow_headers_of_the_next_request_get_408(client, incomplete):
    client.sendall(REQUEST)
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")
    client.sendall(incomplete)
    data, took_s = read_to_end(client)
    assert_is_408(data)
    assert took_s < 8 * LIMIT_S


def test_empty_lines_do_not_keep_a_connection_open():
    with connected_to(slow_clients.with_limits(HttpToolsProtocol)) as client:  # h11 refuses empty lines
        client.sendall(REQUEST)
        read_answer(client)
        assert trickle(client, b"\r\n" * 20) < 40


def test_slow_body_after_an_early_answer_closes_the_connection(client):
    client.sendall(HEAD.replace(b"/", b"/early", 1) + b"\r\n")
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")
    client.sendall(b"b")
    _, took_s = read_to_end(client)
    assert took_s < 8 * LIMIT_S


@pytest.mark.parametrize(("protocol", "status"), [(HttpToolsProtocol, b"431"), (H11Protocol, b"400")])
@pytest.mark.parametrize("incomplete", [b"GET /", b"GET / HTTP/1.1\r\nx", b"GET / HTTP/1.1\r\nx: "])
def test_endless_headers_are_refused(protocol, status, incomplete):
    with connected_to(slow_clients.with_limits(protocol)) as client:
        client.sendall(REQUEST)
        read_answer(client)
        client.sendall(incomplete + b"x" * (slow_clients.MAX_HEADER_BYTES - len(incomplete)))
        client.sendall(b"x")
        data, _ = read_to_end(client)
    assert data.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in data


@pytest.mark.parametrize("incomplete", [b"0\r\nx: ", b"4;x="])
def test_endless_trailers_and_extensions_are_refused(incomplete):
    head = HEAD.replace(b"content-length: 4", b"transfer-encoding: chunked") + b"\r\n4\r\nbody\r\n"
    with connected_to(slow_clients.with_limits(HttpToolsProtocol)) as client, contextlib.suppress(ConnectionError):
        client.sendall(head + incomplete + b"x" * READ_BYTES)
        client.sendall(b"x" * 2 * slow_clients.MAX_HEADER_BYTES)
        assert read_to_end(client)[0] == b""


@pytest.mark.parametrize("path", [b"/", b"/early"])
def test_long_body_is_accepted(client, path):
    body = b"x" * 2 * READ_BYTES
    client.sendall(HEAD.replace(b"/", path, 1).replace(b": 4", f": {len(body)}".encode()) + b"\r\n" + body)
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")
    client.sendall(REQUEST)
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")


def test_slow_body_and_idle_connection_are_accepted(client):
    client.sendall(HEAD + b"\r\n")
    for piece in (b"b", b"o", b"d", b"y"):
        time.sleep(LIMIT_S)
        client.sendall(piece)
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")
    assert is_open(client)
    client.settimeout(10)
    client.sendall(REQUEST)
    assert read_answer(client).startswith(b"HTTP/1.1 200 ")


def test_websocket_has_no_limit(client):
    client.sendall(UPGRADE)
    assert client.recv(65_536).startswith(b"HTTP/1.1 101 ")
    assert is_open(client)


def test_uvicorn_has_no_header_timeout():
    """If this fails, uvicorn has a timeout of its own."""
    with connected_to("auto") as client:
        client.sendall(b"GET")
        assert is_open(client)


def test_rays_proxies_have_the_header_timeout(monkeypatch):
    from ray.serve._private import http_util
    from ray.serve.config import HTTPOptions

    monkeypatch.setattr(http_util, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", proxy.IMPORT_PATH)

    async def response_to_half_a_header():
        options = http_util.configure_http_middlewares(HTTPOptions(host="127.0.0.1", port=0))
        task, server = await http_util.start_asgi_http_server(app, options, event_loop=asyncio.get_running_loop())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        writer.write(b"GET")
        data = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        server.should_exit = True
        await task
        return data

    assert_is_408(asyncio.run(response_to_half_a_header()))


# --- clients that do not read

READER_LIMIT_S = 1.0
NUM_BYTES = 16 << 20
PIECE = b"x" * (1 << 18)


async def large_answer(scope, receive, send):
    """Send a response larger than all buffers between the application and the client."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % NUM_BYTES)]})
    for _ in range(NUM_BYTES // len(PIECE)):
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol])
def server(request, monkeypatch):
    monkeypatch.setattr(slow_clients, "READER_LIMIT_S", READER_LIMIT_S)
    with run_server(slow_clients.with_limits(request.param), large_answer) as server:
        yield server


@contextlib.contextmanager
def connect_and_send(server):
    """Connect with a small receive buffer, and send a request."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(server.servers[0].sockets[0].getsockname())
        client.settimeout(30)
        client.sendall(REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        yield client


@pytest.fixture
def reader(server):
    with connect_and_send(server) as client:
        yield client


def count_until_closed(client, pause_s=0.0):
    """Read until the connection ends; return the number of bytes."""
    total = 0
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 18):
            total += len(piece)
            time.sleep(pause_s)
    return total


def wait_until_no_connections(server):
    deadline = time.monotonic() + 20 * READER_LIMIT_S
    while server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_connection_of_a_client_that_does_not_read_is_closed(server, reader):
    reader.recv(1)
    wait_until_no_connections(server)
    with pytest.raises(ConnectionResetError):  # the data still in the kernel's buffers is discarded, too
        all(reader.recv(1 << 18) for _ in range(NUM_BYTES))


def test_connection_of_a_very_slow_reader_is_closed(server, reader):
    deadline = time.monotonic() + 30 * READER_LIMIT_S
    with contextlib.suppress(ConnectionError):
        while reader.recv(64) and server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(READER_LIMIT_S / 10)
    wait_until_no_connections(server)


def test_slow_reader_gets_the_whole_answer(reader):
    """The time limit applies to each read, not to the whole answer."""
    started_at = time.monotonic()
    assert count_until_closed(reader, pause_s=READER_LIMIT_S / 40) > NUM_BYTES
    assert time.monotonic() - started_at > READER_LIMIT_S


class SlowConnection:
    """A fake connection whose client reads nothing. `owners` is its address and, if known, its key."""

    def __init__(self, owners, unread_bytes, paused_at):
        self.owners, self.unread_bytes, self.paused_at, self.is_aborted = owners, unread_bytes, paused_at, False

    def abort(self):
        self.is_aborted = True


@pytest.mark.parametrize(
    ("connections", "num_aborted"),
    [
        ([(("a", "k"), 20, 0.0), (("b", "k"), 20, 1.0)], 1),  # one key from two addresses
        ([(("a",), 20, 0.0), (("a",), 20, 1.0)], 1),  # one address
        ([(("a", "k"), 20, 0.0), (("b", "l"), 20, 0.0)], 0),
        ([(("a", "k"), 20, 97.0), (("b", "k"), 20, 98.0)], 0),  # not slow for long enough
        ([(("a", "k"), 40, 98.0), (("b", "k"), 1, 0.0)], 1),  # only the smaller buffer is slow
    ],
)
def test_slowest_connections_are_closed_beyond_the_limit(monkeypatch, connections, num_aborted):
    monkeypatch.setattr(slow_clients, "UNREAD_LIMIT_BYTES", 30)
    unread, loop = slow_clients._UnreadMonitor(), SimpleNamespace(time=lambda: 100.0, call_later=lambda *_: None)
    slow = [SlowConnection(*connection) for connection in connections]
    unread._watched = set(slow)
    unread._check(loop)
    aborted = [connection for connection in slow if connection.is_aborted]
    assert len(aborted) == num_aborted
    assert all(connection.paused_at == 0.0 for connection in aborted), "only the slowest may be closed"


def test_memory_is_returned_after_slow_clients(monkeypatch):
    calls = []
    loop = SimpleNamespace(time=lambda: 1.0, call_later=lambda _, callback, *args: calls.append(callback))
    unread = slow_clients._UnreadMonitor()
    reader = SlowConnection(("a",), slow_clients._TRIM_BYTES + 1, 0.0)
    unread._watched = {reader}
    unread._check(loop)
    reader.paused_at = None
    unread._check(loop)
    assert calls == [unread._check, slow_clients.trim_malloc]


def test_application_does_not_wait_for_a_slow_client(server):
    """The client reads nothing until the application has finished."""
    observed = {}

    async def app(scope, receive, send):
        connection = slow_clients.connection_of(scope)
        patient_send = slow_clients.PatientSend(send, connection, "key")
        await large_answer(scope, receive, patient_send)
        observed.update(queued=connection.queued_bytes, unread=connection.unread_bytes, owners=connection.owners)
        await patient_send.drain()
        observed.update(queued_after_drain=connection.queued_bytes)

    server.config.loaded_app.app = app
    with connect_and_send(server) as client:
        deadline = time.monotonic() + 20
        while "owners" not in observed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert count_until_closed(client) >= NUM_BYTES
    assert observed["owners"] == ("127.0.0.1", "key")
    assert observed["unread"] >= observed["queued"] > NUM_BYTES // 2
    assert observed["queued_after_drain"] == 0
