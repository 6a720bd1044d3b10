import socket

import pytest

from peagle.errors import ConfigError
from peagle.ports import free_port, require_free


def test_free_ports_are_below_the_ephemeral_range():
    ports = {free_port() for _ in range(20)}
    assert all(20_000 <= port < 32_768 for port in ports)
    for port in ports:
        require_free("port", port, "127.0.0.1", hint="")


def test_free_port_skips_used_ports(monkeypatch):
    used_port = free_port()
    other_port = free_port()
    monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [used_port, other_port])
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", used_port))
        listening.listen()
        assert free_port() == other_port
        monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [used_port])
        with pytest.raises(OSError, match="in use"):
            free_port()


@pytest.mark.parametrize(
    ("host", "message"), [("203.0.113.7", "Cannot assign requested address"), ("no.such.host.invalid", "")]
)
def test_address_of_another_machine_is_refused(host, message):
    with pytest.raises(ConfigError, match=rf"port \d+ of {host}: {message}"):
        require_free("port", free_port(), host, hint="choose another")


def test_used_ipv6_port_is_refused():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, pytest.raises(ConfigError, match="of ::1: Address already in use"):
        require_free("port", server.getsockname()[1], "::1", hint="choose another")
