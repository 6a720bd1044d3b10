"""Clients that do not read, on raw sockets, against real uvicorn servers with both of its protocols."""

import contextlib
import socket
import threading
import time

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
    """Answers with more than all the buffers between it and a client hold."""
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
    """Bytes that come until the connection ends."""
    total = 0
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 18):
            total += len(piece)
            time.sleep(pause_s)
    return total


def wait_until_nobody_is_connected(server):
    deadline = time.monotonic() + 20 * LIMIT_S
    while server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_does_not_read_is_let_go(server, client):
    client.recv(1)
    wait_until_nobody_is_connected(server)
    with pytest.raises(ConnectionResetError):  # also what the kernel had of the answer is gone
        all(client.recv(1 << 18) for _ in range(NUM_BYTES))


def test_so_is_who_reads_next_to_nothing(server, client):
    deadline = time.monotonic() + 30 * LIMIT_S
    with contextlib.suppress(ConnectionError):
        while client.recv(64) and server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(LIMIT_S / 10)
    wait_until_nobody_is_connected(server)


def test_who_reads_slowly_gets_all_of_it(client):
    """For longer than the limit in all."""
    started = time.monotonic()
    assert num_read(client, pause_s=LIMIT_S / 40) > NUM_BYTES
    assert time.monotonic() - started > LIMIT_S
