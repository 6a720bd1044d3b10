import socket

import pytest

from peagle.errors import ConfigError
from peagle.ports import free_port, require_free


def test_free_port_range():
    ports = {free_port() for _ in range(20)}
    assert all(20_000 <= port < 32_768 for port in ports)
    for port in ports:
        require_free("port", port, "127.0.0.1", hint="")


def test_free_port_skips_used_ports(monkeypatch):
    used = free_port()
    other = free_port()
    monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [used, other])
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", used))
        listening.listen()
        assert free_port() == other
        monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [used])
        with pytest.raises(OSError, match="in use"):
            free_port()


@pytest.mark.parametrize(
    ("host", "message"), [("203.0.113.7", "Cannot assign requested address"), ("no.such.host.invalid", "")]
)
def test_foreign_address_is_refused(host, message):
    with pytest.raises(ConfigError, match=rf"port \d+ of {host}: {message}"):
        require_free("port", free_port(), host, hint="choose another")


def test_ipv6_address():
    try:
        other = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with other, pytest.raises(ConfigError, match="of ::1: Address already in use"):
        require_free("port", other.getsockname()[1], "::1", hint="choose another")
