"""Uploads and downloads through real Ray Serve: concurrent uploads, and downloads that stall."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from peagle.ports import free_port
from pipelines.online.gateway.keys import new_key, write_keys
from tests.chaos.processes import command_line, descendants

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
MIB = 1 << 20
NUM_CLIENTS = 12
DATA = bytes(range(256)) * (48 * MIB // 256)


@pytest.fixture
def endpoint(peagle, tmp_path):
    """The process of an endpoint, its port and two keys."""
    keys = {name: new_key(name) for name in ("alice", "bob")}
    write_keys(tmp_path / "keys.json", [record for _, record in keys.values()])
    port = free_port()
    process = peagle(
        *("serve", "--engine", "fake", "--usd-per-hour", 1, "--port", port, "--state", tmp_path / "state"),
        *("--keys", tmp_path / "keys.json", "--batches", tmp_path / "batches", "--drain-s", 1),
    )
    messages = []
    for line in process.stdout:
        messages.append(line)
        if line.startswith("http://"):
            break
    else:
        raise AssertionError("".join(messages))
    yield process, port, {name: key for name, (key, _) in keys.items()}
    process.terminate()
    assert process.wait(60) == 0


def client_of(port, key):
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=60)


def upload(client):
    return client.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", DATA)})


def memory_mib(process):
    """Return the total memory of ingress and proxy. Shared memory counts twice."""
    pids = [
        pid for pid in descendants(process.pid) if any(name in command_line(pid) for name in ("PeagleIngress", "Proxy"))
    ]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024


def start_stalled_download(port, key, path):
    """Return a client that requests a file and does not read the answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n\r\n".encode())
    return client


def test_concurrent_uploads_and_stalled_downloads_use_little_memory(endpoint):
    process, port, keys = endpoint
    with client_of(port, keys["alice"]) as alice, client_of(port, keys["bob"]) as bob, ExitStack() as stack:
        before_mib = memory_mib(process)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            file_ids = [answer.raise_for_status().json()["id"] for answer in pool.map(upload, [alice] * NUM_CLIENTS)]
        # Each upload needs 2 MiB in transit and 1 MiB of its temporary file. Unlimited uploads need 12 x 48 MiB.
        assert memory_mib(process) - before_mib < 250

        file_of_alice, file_of_bob = f"/files/{file_ids[0]}/content", f"/files/{upload(bob).json()['id']}/content"
        assert bob.get(file_of_bob).content == DATA
        before_mib = memory_mib(process)
        for _ in range(NUM_CLIENTS):
            stack.enter_context(start_stalled_download(port, keys["alice"], f"/v1{file_of_alice}"))
        time.sleep(5)
        assert memory_mib(process) - before_mib < 200  # unlimited downloads need 2 x 12 x 48 MiB
        part = bob.get(file_of_bob, headers={"range": "bytes=1000-1999"})
        assert (part.status_code, part.content) == (206, DATA[1000:2000])
        assert bob.get(file_of_bob).content == DATA
        for _ in range(NUM_CLIENTS):  # beyond the key's limit
            stack.enter_context(start_stalled_download(port, keys["alice"], f"/v1{file_of_alice}"))
        time.sleep(2)
        assert alice.get(file_of_alice).status_code == 429
        assert bob.get(file_of_bob).content == DATA
