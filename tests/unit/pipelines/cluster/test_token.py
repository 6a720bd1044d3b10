"""Ray's token: its file permissions, and which clusters are refused. Real clusters are in test_ray_ports.py."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from peagle.errors import CapacityError, ConfigError
from peagle.ports import free_port
from pipelines.cluster import token

_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home directory without a token, and a permissive umask."""
    for name in _VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch also undoes what the code sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    previous_umask = os.umask(0)
    yield tmp_path
    os.umask(previous_umask)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_local_ray_gets_a_private_token(home):
    token.prepare_to_start()
    file = home / ".ray" / "auth_token"
    assert len(file.read_text()) == 64
    assert [mode(file), mode(file.parent)] == [0o600, 0o700]
    assert "RAY_AUTH_MODE" not in os.environ  # Ray requires the token by default on a cluster that it starts
    token_text = file.read_text()
    token.prepare_to_start()
    assert file.read_text() == token_text


@pytest.mark.parametrize("prepare", [token.prepare_to_start, token.prepare_to_join])
def test_readable_token_is_made_private(home, prepare, caplog):
    file = home / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("t" * 64)
    file.chmod(0o644)
    prepare()
    assert (mode(file), file.read_text()) == (0o600, "t" * 64)
    assert "was readable by other users" in caplog.text


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_token_variables_are_used(home, monkeypatch, variable):
    monkeypatch.setenv(variable, "theirs")
    token.prepare_to_start()
    assert not (home / ".ray").exists()
    token.prepare_to_join()
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(("mode_before", "mode_after"), [("", None), ("tokn", None), ("Token", "Token")])
def test_misspelled_auth_mode_does_not_disable_tokens(monkeypatch, mode_before, mode_after):
    monkeypatch.setenv("RAY_AUTH_MODE", mode_before)
    token.prepare_to_start()
    assert os.environ.get("RAY_AUTH_MODE") == mode_after


def test_no_token_is_made_if_authentication_is_disabled(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    token.prepare_to_start()
    token.prepare_to_join()
    token.require_token()  # no request is sent
    assert not (home / ".ray").exists()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_unwritable_home_is_refused(home):
    (home / ".ray").touch()
    with pytest.raises(ConfigError, match=r"Ray's token .*auth_token cannot be written(.|\n)*RAY_AUTH_TOKEN"):
        token.prepare_to_start()


def test_no_token_is_used_to_join_if_none_exists():
    token.prepare_to_join()
    assert "RAY_AUTH_MODE" not in os.environ


class _FakeGcs(grpc.GenericRpcHandler):
    """A fake of Ray's control service: "open" needs no token, "closed" needs a token, "unknown" lacks the method."""

    def __init__(self, answer):
        self._answer = answer

    def service(self, details):
        if self._answer == "unknown":
            return None

        def handle(request, context):
            if self._answer == "closed":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
            return b""

        return grpc.unary_unary_rpc_method_handler(handle)


@pytest.fixture
def start_cluster(monkeypatch):
    """Return a function that starts a server, makes this process appear connected to it, and returns its address."""
    servers = []

    def start(answer):
        server = grpc.server(ThreadPoolExecutor(1), handlers=[_FakeGcs(answer)])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        return address

    yield start
    for server in servers:
        server.stop(None)


def test_cluster_without_token_is_refused(start_cluster):
    address = start_cluster("open")
    with pytest.raises(ConfigError, match=rf"{address} requires no token(.|\n)*MODE=token(.|\n)*MODE=disabled"):
        token.require_token()


def test_cluster_with_token_is_accepted(start_cluster):
    start_cluster("closed")
    token.require_token()


def test_cluster_with_unknown_answer_is_refused(start_cluster):
    start_cluster("unknown")
    with pytest.raises(CapacityError, match=r"cannot determine whether the Ray cluster .* UNIMPLEMENTED"):
        token.require_token()


def test_cluster_with_tls_is_accepted_without_a_check(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
    token.require_token()


def test_token_check_uses_an_existing_call():
    from ray.core.generated import gcs_service_pb2

    service, _, method = token._CALL.removeprefix("/ray.rpc.").partition("/")
    assert method in gcs_service_pb2.DESCRIPTOR.services_by_name[service].methods_by_name
