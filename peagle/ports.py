"""A TCP port for somebody who is about to listen on one."""

import contextlib
import random
import socket

# Ray's workers have 10002 to 19999; from 32768 on Linux gives ports to whoever asks for any, as Ray's processes do.
_PORTS = range(20_000, 32_768)
_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on, and that nobody gets who only asks for any.

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
