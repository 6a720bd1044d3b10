"""Clients that do not read, on raw sockets, against real uvicorn servers with both of its protocols."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipelines.online.serve import slow_clients
from pipelines.online.serve import slow_clients as slow_readers

LIMIT_S = 1.0
NUM_BYTES = 16 << 20
PIECE = b"x" * (1 << 18)
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def app(scope, receive, send):
    """Send a response larger than all buffers between the application and the client."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % NUM_BYTES)]})
    for _ in range(NUM_BYTES // len(PIECE)):
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol])
def server(request, monkeypatch):
    monkeypatch.setattr(slow_readers, "READER_LIMIT_S", LIMIT_S)
    protocol = slow_clients.limited(request.param)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=protocol, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join()


@pytest.fixture
def client(server):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(server.servers[0].sockets[0].getsockname())
        client.settimeout(30)
        client.sendall(REQUEST)
        yield client


def num_read(client, pause_s=0.0):
    """Return the number of bytes until the connection ends."""
    total = 0
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 18):
            total += len(piece)
            time.sleep(pause_s)
    return total


def wait_until_no_connections(server):
    deadline = time.monotonic() + 20 * LIMIT_S
    while server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_connection_without_reader_is_closed(server, client):
    client.recv(1)
    wait_until_no_connections(server)
    with pytest.raises(ConnectionResetError):  # the data still in the kernel's buffers is discarded, too
        all(client.recv(1 << 18) for _ in range(NUM_BYTES))


def test_very_slow_reader_is_closed(server, client):
    deadline = time.monotonic() + 30 * LIMIT_S
    with contextlib.suppress(ConnectionError):
        while client.recv(64) and server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(LIMIT_S / 10)
    wait_until_no_connections(server)


def test_slow_reader_gets_the_whole_answer(client):
    """Even if it takes longer than the limit in total."""
    started = time.monotonic()
    assert num_read(client, pause_s=LIMIT_S / 40) > NUM_BYTES
    assert time.monotonic() - started > LIMIT_S


class SlowReader:
    """A connection that reads nothing."""

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
        ([(("a", "k"), 20, 97.0), (("b", "k"), 20, 98.0)], 0),  # slow only briefly
        ([(("a", "k"), 40, 98.0), (("b", "k"), 1, 0.0)], 1),
    ],
)
def test_slowest_connections_are_closed_beyond_the_limit(monkeypatch, connections, num_aborted):
    monkeypatch.setattr(slow_readers, "UNREAD_LIMIT_BYTES", 30)
    unread, loop = slow_readers._Unread(), SimpleNamespace(time=lambda: 100.0, call_later=lambda *_: None)
    slow = [SlowReader(*connection) for connection in connections]
    unread._watched = set(slow)
    unread._check(loop)
    aborted = [reader for reader in slow if reader.is_aborted]
    assert len(aborted) == num_aborted
    assert all(item.paused_at == 0.0 for item in aborted)  # the slowest


def test_memory_is_returned_after_slow_readers(monkeypatch):
    calls = []
    loop = SimpleNamespace(time=lambda: 1.0, call_later=lambda _, what, *args: calls.append(what))
    unread = slow_readers._Unread()
    reader = SlowReader(("a",), slow_readers._TRIM_BYTES + 1, 0.0)
    unread._watched = {reader}
    unread._check(loop)
    reader.paused_at = None
    unread._check(loop)
    assert calls == [unread._check, slow_readers.trim_malloc]


def test_application_does_not_wait_for_a_slow_client(server):
    """The client reads nothing until the application has finished."""
    seen = {}

    async def eager(scope, receive, send):
        connection = slow_readers.connection_of(scope)
        patient = slow_readers.PatientSend(send, connection, "key")
        await app(scope, receive, patient)
        seen.update(queued=connection.queued_bytes, unread=connection.unread_bytes, owners=connection.owners)
        await patient.drain()
        seen.update(left=connection.queued_bytes)

    server.config.loaded_app.app = eager
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(server.servers[0].sockets[0].getsockname())
        client.settimeout(30)
        client.sendall(REQUEST)
        deadline = time.monotonic() + 20
        while "owners" not in seen:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert num_read(client) >= NUM_BYTES
    assert seen["owners"] == ("127.0.0.1", "key")
    assert seen["unread"] >= seen["queued"] > NUM_BYTES // 2
    assert seen["left"] == 0
