"""TCP ports for somebody who is about to listen on one."""

import contextlib
import random
import socket

from peagle.errors import ConfigError

# Ray's workers have 10002 to 19999; from 32768 on Linux gives ports to whoever asks for any, as Ray's processes do.
_PORTS = range(20_000, 32_768)
_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A free port of `host` that nobody gets who only asks for any.

    Args:
        host: an address of this machine; empty for all.

    Raises:
        OSError: none was found.
    """
    for port in random.SystemRandom().sample(_PORTS, _ATTEMPTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"{_ATTEMPTS} ports of {host or 'this machine'} between {_PORTS[0]} and {_PORTS[-1]} are in use")


def is_service_link(value: str) -> bool:
    """Whether a variable NAME_PORT is Kubernetes' address of a service NAME.

    It is in every pod.

    >>> is_service_link("tcp://10.0.0.1:8000"), is_service_link("8000")
    (True, False)
    """
    return value.startswith(("tcp://", "udp://", "sctp://"))


def is_free(port: int, host: str = "") -> bool:
    """Whether somebody could listen on a port of `host`."""
    return _fault(port, host) is None


def require_free(key: str, port: int, host: str = "", *, hint: str) -> None:
    """Refuse a port in use, or an address that is not this machine's.

    Ray Serve would share its port with any other Serve, so that each gets some of the connections.

    Args:
        key: of the configuration.
        host: address to listen on; empty for all.

    Raises:
        ConfigError: it cannot be had.
    """
    if (error := _fault(port, host)) is not None:
        where = f" of {host}" if host else ""
        raise ConfigError(f"{key} {port}{where}: {error.strerror}", hint=hint) from error


def _fault(port: int, host: str) -> OSError | None:
    """The error of whoever would listen there; None where it is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
