"""Ray's authentication token: with it, anyone can run any code on the cluster's nodes.

Ray 2.60 requires a token only if each process has RAY_AUTH_MODE=token, or on a cluster that `ray.init` starts. peagle
requires one on every cluster that it starts or joins, unless RAY_AUTH_MODE=disabled.
"""

import contextlib
import logging
import os
import secrets
from pathlib import Path

from peagle.errors import CapacityError, ConfigError
from peagle.files import write_once
from peagle.private import SECRET_MODE, user_path

_MODE_VARIABLE, _TOKEN_VARIABLE, _TOKEN_PATH_VARIABLE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# A harmless call that every Ray cluster answers, or refuses without a token.
_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_TIMEOUT_S = 20.0
_OPEN_HINT = (
    "start its nodes with RAY_AUTH_MODE=token in their environment: docs/security.md.\n"
    "Set RAY_AUTH_MODE=disabled only if everyone on the network and the machine may run any code"
)
_log = logging.getLogger(__name__)


def is_disabled() -> bool:
    return os.environ.get(_MODE_VARIABLE, "").lower() == "disabled"


def token_file() -> Path:
    """Return Ray's default token file.

    Raises:
        ConfigError: the home folder is unknown.
    """
    return user_path("~/.ray/auth_token")


def prepare_to_start() -> None:
    """Require a token for the Ray cluster that starts here, and create the token if it is missing.

    Ray would create the file with the permissions of the umask, usually readable by all users.

    Raises:
        ConfigError: the file cannot be written.
    """
    if is_disabled():
        return
    if os.environ.get(_MODE_VARIABLE, "").lower() != "token":
        os.environ.pop(_MODE_VARIABLE, None)  # Ray disables tokens for any value but "token", including misspelled ones
    if os.environ.get(_TOKEN_VARIABLE) or os.environ.get(_TOKEN_PATH_VARIABLE):
        return
    path = token_file()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_once(path, secrets.token_hex(32).encode(), mode=SECRET_MODE)
    except OSError as error:
        raise ConfigError(
            f"Ray's token file {path} cannot be written: {error.strerror}",
            hint=f"set HOME to a folder that this user can write to, or {_TOKEN_VARIABLE} to a long random string",
        ) from error
    _make_private(path)


def prepare_to_join() -> None:
    """Use this machine's token to join a cluster, which Ray does only if RAY_AUTH_MODE=token."""
    if is_disabled():
        return
    path = token_file()
    if path.is_file():
        _make_private(path)
    if os.environ.get(_TOKEN_VARIABLE) or os.environ.get(_TOKEN_PATH_VARIABLE) or path.is_file():
        os.environ[_MODE_VARIABLE] = "token"  # Ray reads this variable on import


def require_token() -> None:
    """Refuse a joined cluster that requires no token.

    Raises:
        ConfigError: the cluster requires no token, and tokens are not disabled.
        CapacityError: the cluster does not respond.
    """
    if is_disabled():
        return
    import ray

    address = ray.get_runtime_context().gcs_address
    if _is_open(address):
        raise ConfigError(
            f"the Ray cluster at {address} requires no token: anyone who reaches its ports can run code on "
            "the cluster's nodes",
            hint=_OPEN_HINT,
        )


def _is_open(address: str) -> bool:
    """Whether the cluster at this address answers without a token."""
    import grpc

    has_tls = os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(_CALL, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=_TIMEOUT_S, wait_for_ready=not has_tls)
        except grpc.RpcError as error:
            # With Ray's TLS, a connection without a certificate fails.
            if has_tls or error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise CapacityError(
                f"cannot determine whether the Ray cluster at {address} requires a token: {error.code().name}",
                hint="make sure that the cluster is up, then run the same command again",
            ) from error
    return True


def _make_private(path: Path) -> None:
    status = path.stat()
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a secret that Kubernetes mounts cannot be changed
            path.chmod(SECRET_MODE)
        _log.warning(
            "%s was readable by other users: on a shared machine, delete it while none of your Ray clusters is running",
            path,
        )
