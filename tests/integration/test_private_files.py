"""A run and an endpoint keep files and ports private, even with an empty umask."""

import contextlib
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from unauthenticated_calls import port_protection

from pipelines.online.gateway.keys import new_key, write_keys
from tests.chaos.processes import descendants
from tests.faults.endpoint import MODEL, Endpoint, Size

ROOT = Path(__file__).parents[2]
START_S = 180

pytestmark = pytest.mark.timeout(2 * START_S)


@pytest.fixture(autouse=True)
def shared_tmp(tmp_path, monkeypatch):
    """Clear the umask, use a home without a token, and yield a temporary folder that is world-writable."""
    shared = Path("/tmp") / f"shared-{os.getpid()}"  # short, because paths of Ray's sockets have a maximum length
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    previous_umask = os.umask(0)
    yield shared
    os.umask(previous_umask)
    subprocess.run(["rm", "-rf", shared], check=True)


def accessible_to_others(folder):
    """Return the files and folders that other users can access, except those inside private folders."""
    results = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            continue
        if mode & 0o007:
            results.append((str(path), oct(stat.S_IMODE(mode))))
        if stat.S_ISDIR(mode) and mode & 0o077:
            results += accessible_to_others(path)
    return results


def test_files_of_a_run_are_private(shared_tmp, write_jsonl, tmp_path):
    corpus, parent = write_jsonl([{"prompt": str(n)} for n in range(5)] + ["not a row"]), tmp_path / "made"
    command = [
        sys.executable, "-m", "jobs.generate", "--engine", "fake", "--input", corpus, "--output", parent / "run",
        "--rows-per-unit", "2", "--output-format", "jsonl",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name for path in (parent / "run").iterdir()} >= {
        "data",
        "failed",
        "ledger",
        "logs",
        "run.json",
        "export",
    }
    assert accessible_to_others(parent) == []
    assert stat.S_IMODE(parent.stat().st_mode) == 0o770
    check_shared_folders_are_private(shared_tmp)


@pytest.fixture
def cert_and_key(tmp_path):
    """A certificate for this machine's address, and its private key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ("-days", "2", "-subj", "/CN=peagle", "-addext", f"subjectAltName=IP:{own_address()}")
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


def test_endpoint_is_private_and_uses_https(shared_tmp, cert_and_key, tmp_path):
    key, record = new_key("alice")
    keys, folder = tmp_path / "keys.json", tmp_path / "made"
    write_keys(keys, [record])
    flags = [*Size(min_replicas=1, max_replicas=1).flags(), "--batches", str(folder / "batches"), "--log-prompts"]
    flags += ["--host", "0.0.0.0", "--keys", str(keys)]
    flags += ["--tls-cert", str(cert_and_key[0]), "--tls-key", str(cert_and_key[1])]
    endpoint = Endpoint(folder, flags)
    port = int(endpoint.url.rpartition(":")[2])
    endpoint.url = f"https://0.0.0.0:{port}"
    try:
        endpoint.wait_until_up(START_S)
        check_requests(f"https://{own_address()}:{port}", key, ssl.create_default_context(cafile=cert_and_key[0]))
        other_ports = reachable_ports(endpoint.process.pid) - {port}
        # Serve's replicas listen on all addresses, but must require Ray's token.
        assert {port_protection(own_address(), other_port) for other_port in other_ports} <= {"token"}
    finally:
        endpoint.stop()
    (folder / "serve.log").chmod(0o600)  # created by this test, not by the endpoint
    assert {path.name for path in (folder / "state").iterdir()} >= {"ledger", "logs", "prompts"}
    assert accessible_to_others(folder) == []
    check_shared_folders_are_private(shared_tmp)


def check_requests(url, key, ssl_context):
    """Send a request, a stream and a batch. `ssl_context` trusts the certificate."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "secret"}], "max_tokens": 4}
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{url}/health")  # the default trust store does not have the certificate
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{url.replace('https', 'http')}/health")
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, verify=ssl_context, timeout=60,
        headers={"authorization": f"Bearer {key}"},
    ) as answer:  # fmt: skip
        *events, last = (line for line in answer.iter_lines() if line)
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    assert last == "data: [DONE]"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    http = httpx.Client(verify=ssl_context)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2, http_client=http) as client:
        assert client.chat.completions.create(**body).usage.completion_tokens == 4
        file = client.files.create(file=("input.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        deadline = time.monotonic() + START_S
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() < deadline, batch
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        assert b"custom_id" in client.files.content(batch.output_file_id).read()


def own_address():
    """Return a non-loopback address of this machine if there is one."""
    addresses = [
        address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
    ]
    return next((address.address for address in addresses if not address.address.startswith("127.")), "127.0.0.1")


def reachable_ports(pid):
    """Return the ports of a process and its children that other machines can reach."""
    sockets = []
    for child in [pid, *descendants(pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
            sockets += psutil.Process(child).net_connections("tcp")
    listening = [socket.laddr for socket in sockets if socket.status == "LISTEN"]
    return {
        address.port
        for address in listening
        if not address.ip.removeprefix("::ffff:").startswith("127.") and address.ip != "::1"
    }


def check_shared_folders_are_private(shared):
    """Check the files outside the output folder: Ray's session, sockets and token, and the locks of engine slots."""
    assert [path.name for path in shared.iterdir()] == [f"peagle-{os.geteuid()}"]
    assert stat.S_IMODE((shared / f"peagle-{os.geteuid()}").stat().st_mode) == 0o700
    assert accessible_to_others(Path.home()) == []
    assert stat.S_IMODE((Path.home() / ".ray" / "auth_token").stat().st_mode) == 0o600
