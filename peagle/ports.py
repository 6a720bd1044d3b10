"""Free TCP ports."""

import contextlib
import random
import socket

from peagle.errors import ConfigError

# Outside the ports of Ray's workers (10002 to 19999) and those that Linux assigns automatically (from 32768).
_PORTS = range(20_000, 32_768)
_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of `host` (empty means all addresses) that neither Ray nor Linux assigns automatically."""
    for port in random.SystemRandom().sample(_PORTS, _ATTEMPTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"{_ATTEMPTS} ports of {host or 'this machine'} between {_PORTS[0]} and {_PORTS[-1]} are in use")


def is_service_link(value: str) -> bool:
    """Return whether the value of a variable NAME_PORT is from Kubernetes, which sets one for each service NAME.

    >>> is_service_link("tcp://10.0.0.1:8000"), is_service_link("8000")
    (True, False)
    """
    return value.startswith(("tcp://", "udp://", "sctp://"))


def is_free(port: int, host: str = "") -> bool:
    """Return whether a process could listen on a port of `host`."""
    return _bind_error(port, host) is None


def require_free(option: str, port: int, host: str = "", *, hint: str) -> None:
    """Raise ConfigError, naming `option`, if a port is in use or `host` is not an address of this machine."""
    # Without this check, Ray Serve would share the port with another Serve, and each would get some connections.
    if (error := _bind_error(port, host)) is not None:
        where = f" of {host}" if host else ""
        raise ConfigError(f"{option} {port}{where}: {error.strerror}", hint=hint) from error


def _bind_error(port: int, host: str) -> OSError | None:
    """Return the error of binding the port, or None if it is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore closed connections
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
