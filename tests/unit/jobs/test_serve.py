import json
import shlex
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from jobs import cli, serve
from peagle.errors import ConfigError, EngineError
from pipelines.online.config import ServeConfig


@pytest.fixture
def run_serve(tmp_path, capsys):
    def run(*arguments):
        code = cli.run(["serve", "--state", str(tmp_path / "state"), "--usd-per-hour", "1", *arguments])
        return code, capsys.readouterr().err

    return run


def test_empty_key_file_is_refused(run_serve, embedded_target, tmp_path):
    code, error = run_serve("--keys", str(tmp_path / "none.json"))
    assert code == 2
    assert "contains no keys" in error


def test_too_many_engines_are_refused(run_serve, embedded_target):
    code, error = run_serve("--max-replicas", "1000")
    assert code == 1
    assert "1000 engines" in error


def test_port_in_use_is_refused(run_serve, embedded_target):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # like the proxy of Ray Serve
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, error = run_serve("--port", str(port))
    assert code == 2
    assert f"port {port} of 127.0.0.1: Address already in use" in error


def test_metrics_port_of_remote_cluster_is_refused(run_serve, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    code, error = run_serve("--engine", "fake", "--metrics-port", "9000")
    assert code == 2
    assert "ray start --metrics-export-port" in error


def set_listening_address(monkeypatch, host, port, ssl_certfile=None, ssl_keyfile=None):
    """Make Ray Serve report this address and certificate, whatever options it is started with."""
    from ray import serve
    from ray.serve import context

    http_config = SimpleNamespace(host=host, port=port, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile)
    client = SimpleNamespace(http_config=http_config)
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(context, "_get_global_client", lambda: client)


@pytest.mark.parametrize(("is_remote", "expected_calls"), [(True, [("delete", "peagle")]), (False, [("shutdown",)])])
@pytest.mark.parametrize(
    ("error", "expected_error"), [(RuntimeError("no"), EngineError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_failed_start_deletes_only_its_own_application(
    monkeypatch, tmp_path, is_remote, expected_calls, error, expected_error
):
    from ray import serve

    from jobs.serve import _deploy
    from pipelines.online import app

    calls = []

    def run(*_, **__):
        raise error

    monkeypatch.setattr(app, "bind", lambda *_: None)
    set_listening_address(monkeypatch, ServeConfig().host, ServeConfig().port)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: calls.append(("delete", name)))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append(("shutdown",)))
    with pytest.raises(expected_error):
        _deploy(ServeConfig(state=tmp_path), None, [], is_remote=is_remote)
    assert calls == expected_calls


@pytest.mark.parametrize(
    ("status", "is_refused"),
    [("RUNNING", True), ("DEPLOYING", True), ("UNHEALTHY", True), ("DELETING", True), ("DEPLOY_FAILED", False)],
)
def test_existing_application_is_not_replaced(monkeypatch, tmp_path, status, is_refused):
    from ray import serve
    from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeStatus

    from jobs.serve import _deploy
    from pipelines.online import app

    calls = []
    overview = ApplicationStatusOverview(ApplicationStatus(status), "", 0.0, {})
    monkeypatch.setattr(app, "bind", lambda *_: None)
    set_listening_address(monkeypatch, ServeConfig().host, ServeConfig().port)
    monkeypatch.setattr(serve, "status", lambda: ServeStatus(applications={"peagle": overview, "another": overview}))
    for name in ("run", "delete", "shutdown"):
        monkeypatch.setattr(serve, name, lambda *_, _called=name, **__: calls.append(_called))
    with pytest.raises(ConfigError, match=rf"an application `peagle` \({status}\)") if is_refused else nullcontext():
        _deploy(ServeConfig(state=tmp_path), None, [], is_remote=True)
    assert calls == ([] if is_refused else ["run"])


@pytest.mark.parametrize(
    ("http_options", "options", "message"),
    [
        ({}, {"tls_cert": "/c.pem", "tls_key": "/k.pem"}, "without TLS"),
        ({"ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem"}, {}, "with the certificate /c.pem"),
        ({"ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem"}, {"tls_cert": "/d.pem", "tls_key": "/k.pem"}, "/c.pem"),
    ],
)
def test_certificate_of_running_serve_must_match(monkeypatch, tmp_path, http_options, options, message):
    """Otherwise, keys would be sent in plain text despite --tls-cert."""
    from ray import serve

    from jobs.serve import _deploy

    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    set_listening_address(monkeypatch, "127.0.0.1", 8000, **http_options)
    with pytest.raises(ConfigError, match=message):
        _deploy(ServeConfig(state=tmp_path, **options), None, [], is_remote=True)


def test_certificate_without_key_is_refused(run_serve, tmp_path):
    code, error = run_serve("--tls-cert", str(tmp_path / "cert.pem"))
    assert (code, "tls_cert is set without tls_key" in error) == (2, True)
    code, error = run_serve("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    assert (code, f"tls_cert {tmp_path / 'cert.pem'}: No such file" in error) == (2, True)


@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize(("deletion_s", "is_deleted"), [(200, True), (10_000, False)])
def test_shutdown_waits_for_running_requests(monkeypatch, capsys, is_remote, deletion_s, is_deleted):
    from ray import serve

    from jobs import serve as job

    now, calls = [0.0], []

    def sleep(seconds):
        now[0] += seconds

    def status():
        return SimpleNamespace(applications={"peagle": "DELETING"} if now[0] < deletion_s else {})

    def shutdown():
        calls.append(("shutdown", now[0]))

    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: calls.append((name, _blocking)))
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "shutdown", shutdown)
    config = ServeConfig(models=[{"name": "a", "drain_s": 100}, {"name": "b", "drain_s": 1}])
    job._shutdown(config, is_remote=is_remote, is_up=True)
    assert now[0] == (200 if is_deleted else 230)  # the limit is twice the longest drain_s plus 30 s
    assert calls == [("peagle", False), *([] if is_remote else [("shutdown", now[0])])]
    assert ("was not deleted" not in capsys.readouterr().out) == is_deleted


@pytest.mark.parametrize("keys", [None, "keys.json"])
def test_example_requests_in_the_banner_are_valid(keys, tmp_path):
    config = ServeConfig(engine="fake", name="parrot", host="0.0.0.0", port=8123, keys=keys and tmp_path / keys)
    text = serve._banner(config, 9090)
    assert "0.0.0.0" not in text
    assert "http://127.0.0.1:9090/metrics" in text
    curl = next(line for line in text.splitlines() if line.startswith("curl"))
    words = shlex.split(curl.removeprefix("curl"))
    assert words[1] == "http://127.0.0.1:8123/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "parrot"
    assert ("Authorization: Bearer $API_KEY" in words) == (keys is not None)
    code = "\n".join(line[9:] for line in text.splitlines()[-4:])
    compile(code, "banner", "exec")
    assert ('os.environ["API_KEY"]' in code) == (keys is not None)
