"""`peagle serve` by https, with a certificate that is made here; the fake engine on real Ray Serve."""

import json
import ssl
import subprocess

import httpx
import pytest

from peagle.ports import free_port

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def files(tmp_path):
    """A certificate of 127.0.0.1, and its key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ("-days", "2", "-subj", "/CN=peagle", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


@pytest.fixture
def port(peagle, files, tmp_path):
    """Of an endpoint that is up."""
    number, (certificate, key) = free_port(), files
    process = peagle(
        *("serve", "--port", number, "--state", tmp_path / "state", "--engine", "fake", "--usd-per-hour", 1),
        *("--tls-cert", certificate, "--tls-key", key),
    )
    for line in process.stdout:
        if line.startswith("https://"):
            assert line.strip() == f"https://127.0.0.1:{number}/v1"
            return number
    raise AssertionError("it did not start")


def test_clients_come_by_https_and_by_nothing_else(port, files):
    url, trusted = f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=files[0])
    body = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "max_tokens": 8, "ignore_eos": True}
    with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok", "requires_key": False}
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 8
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            *events, last = (line for line in answer.iter_lines() if line)
        assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
        assert last == "data: [DONE]"
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{url}/health")  # who does not know the certificate
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{port}/health")
