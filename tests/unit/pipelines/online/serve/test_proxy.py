import asyncio
import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from peagle.errors import ConfigError
from pipelines.online.app import build
from pipelines.online.config import ServeConfig
from pipelines.online.serve import proxy
from pipelines.online.serve.proxy import ProxyMiddleware, middlewares, require_certificate

GATE_HEADER = (b"x-peagle-request-id", b"r")  # marks answers of the gate
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


def start(status, *headers):
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(text=b"", more_body=False):
    return {"type": "http.response.body", "body": text, "more_body": more_body}


def messages_through(ray_proxy, *, kind="http", path="/v1/models", headers=(), method="GET"):
    """Return the messages that the middleware sends to a client."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers), "method": method}
    asyncio.run(ProxyMiddleware(ray_proxy)(scope, None, send))
    return sent


def client_messages(*messages, error=None, **request):
    """Return what a client receives if the proxy sends these messages and then raises `error`, if given."""

    async def ray_proxy(scope, receive, send):
        for message in messages:
            await send(message)
        if error:
            raise error

    return messages_through(ray_proxy, **request)


def forwarded_headers(*headers, **request):
    """Return the client's headers that reach the proxy."""
    seen = []

    async def ray_proxy(scope, receive, send):
        seen.extend(scope["headers"])

    messages_through(ray_proxy, headers=headers, **request)
    return seen


def messages_without_route(path):
    """Return the messages that Ray's proxy sends if no application has the path."""
    from ray.serve._private.proxy import HTTPProxy

    async def messages():
        *raw_messages, _ = [message async for message in HTTPProxy.not_found_response(None, SimpleNamespace(path=path))]
        return raw_messages

    return asyncio.run(messages())


@pytest.mark.parametrize(
    "messages",
    [
        (start(200, GATE_HEADER), body(b"all")),
        (start(200, GATE_HEADER, EVENT_STREAM), body(b"data: 1\n\n", True), body()),
        (start(503, GATE_HEADER), body(b"from the gate")),
        (start(404, GATE_HEADER), body(b"from the gate")),
        (start(404), body(b"no such route")),
        (start(404), body(b"from another application, ", True), body(b"in pieces")),
        (start(200, GATE_HEADER), body(b"half", True)),
    ],
)
def test_answers_of_the_ingress_are_unchanged(messages):
    assert client_messages(*messages) == list(messages)


@pytest.mark.parametrize("messages", [(), (start(500), body(b"ActorDiedError: ray::Secret")), (start(503), body(b"x"))])
def test_crashed_ingress_is_503(messages):
    head, text = client_messages(*messages)
    assert head["status"] == 503
    assert int(dict(head["headers"])[b"retry-after"]) > 0
    assert int(dict(head["headers"])[b"content-length"]) == len(text["body"])
    assert json.loads(text["body"])["error"]["code"] == "overloaded"


@pytest.mark.parametrize("path", ["/v1/models", "/prefix/v1/chat/completions", "/invocations"])
def test_missing_endpoint_is_503(path):
    messages = messages_without_route(path)
    assert messages[0]["status"] == 404
    head, text = client_messages(*messages, path=path)
    assert head["status"] == 503
    assert int(dict(head["headers"])[b"retry-after"]) > 0
    assert json.loads(text["body"])["error"]["code"] == "overloaded"


@pytest.mark.parametrize("path", ["/", "/another/application"])
def test_404_of_other_paths_is_unchanged(path):
    messages = messages_without_route(path)
    assert client_messages(*messages, path=path) == messages


@pytest.mark.parametrize("error", [None, KeyError("Secret")])
def test_interrupted_stream_ends_with_an_error_event(error):
    sent = [start(200, GATE_HEADER, EVENT_STREAM), body(b"data: 1\n\n", True)]
    *first, last = client_messages(*sent, error=error)
    assert first == sent
    assert not last["more_body"]
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", ["/v1/models", "/another/application"])
def test_failure_of_the_proxy_is_503(path):
    head, text = client_messages(error=KeyError("Secret"), path=path)
    assert head["status"] == 503
    assert json.loads(text["body"])["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    "messages",
    [
        (start(500), body(b"its own page")),
        (start(503, EVENT_STREAM), body(b"in ", True), body(b"pieces")),
        (start(200, EVENT_STREAM), body(b"data: 1\n\n", True)),
    ],
)
def test_answers_of_other_applications_are_unchanged(messages):
    assert client_messages(*messages, path="/another/application") == list(messages)


def test_answers_of_the_gate_are_recognised_on_any_path():
    *_, last = client_messages(start(200, GATE_HEADER, EVENT_STREAM), body(b"data: 1\n\n", True), path="/elsewhere")
    assert b"overloaded_error" in last["body"]


@pytest.fixture
def control_headers():
    """The names of the headers that Ray's proxy obeys, and the names of those that it logs."""
    from ray.serve._private import constants as ray

    obeyed = [
        ray.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        ray.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        ray.SERVE_MULTIPLEXED_MODEL_ID,
        ray.SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
    ]
    logged = [ray.SERVE_HTTP_REQUEST_ID_HEADER, ray.SERVE_SESSION_ID, ray.SERVE_SESSION_ID.replace("-", "_")]
    return [name.encode() for name in obeyed], [name.encode() for name in logged]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_control_headers_of_clients_are_removed(control_headers, kind):
    obeyed, logged = ([(name, "é".encode()) for name in names] for names in control_headers)
    assert forwarded_headers(*obeyed, *logged, kind=kind) == []
    assert forwarded_headers(*obeyed, *logged, kind=kind, path="/another/application") == [*obeyed, *logged]


def test_long_logged_values_are_removed_or_refused(control_headers):
    """Ray logs the method, the path, and the request and session ids."""
    _, logged = control_headers
    path = "/another/application"
    assert forwarded_headers(*((name, b"x" * 129) for name in logged), path=path) == []
    # The path and the method are one character too long.
    for request, status in (({"path": "/" + "x" * 2048}, 414), ({"method": "X" * 17}, 405)):
        head, _ = messages_through(None, **request)
        assert head["status"] == status


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_undecodable_headers_are_removed(control_headers, kind, path):
    other = (b"x-other", b"\xff")
    unreadable = [(name, b"\xff") for names in control_headers for name in names]
    assert forwarded_headers(*unreadable, other, kind=kind, path=path) == [other]


def test_lifespan_messages_are_unchanged():
    message = {"type": "lifespan.startup.complete"}
    assert client_messages(message, kind="lifespan") == [message]


def test_import_path_names_the_middlewares(monkeypatch):
    from uvicorn.protocols.http import auto

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # monkeypatch restores it
    module, _, name = proxy.IMPORT_PATH.partition(":")
    assert (module, name) == (proxy.__name__, "middlewares")
    (middleware,) = middlewares()
    assert middleware.cls is ProxyMiddleware


def test_rays_timeout_is_disabled():
    """Ray reads the variable when its module is imported, so the test needs another process."""
    script = "from ray.llm._internal.serve.constants import DEFAULT_LLM_ROUTER_HTTP_TIMEOUT as s; print(s)"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=os.environ | proxy.ENVIRONMENT, capture_output=True, text=True, check=True)
    assert float(result.stdout) > 30 * 24 * 3600


def test_ray_reads_the_variables():
    """Ray reads the variables at import, so the test needs other processes. Without them, Ray's defaults apply."""
    script = """if True:
        from ray.serve._private import constants as c
        print(c.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, c.PROXY_HEALTH_CHECK_PERIOD_S, c.CONTROL_LOOP_INTERVAL_S,
              c.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, c.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP)
    """
    other_variables = {name: value for name, value in os.environ.items() if name not in proxy.ENVIRONMENT}
    outputs = [
        subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
        for env in (other_variables | proxy.ENVIRONMENT, other_variables)
    ]
    assert outputs == [f"{proxy.IMPORT_PATH} 2.0 0.5 False False\n", "None 10.0 0.1 True True\n"]


def test_ray_reads_the_log_rotation_variables():
    from ray._private import node

    source = inspect.getsource(node)
    assert [name for name in proxy.ENVIRONMENT if "ROTATION" in name and name in source] == [
        "RAY_ROTATION_MAX_BYTES",
        "RAY_ROTATION_BACKUP_COUNT",
    ]


async def test_rays_404_has_the_expected_text():
    from ray.serve._private.proxy import HTTPProxy

    request = SimpleNamespace(path="/v1/models")
    head, answer, *_ = [message async for message in HTTPProxy.not_found_response(None, request)]
    assert head["status"] == proxy._NOT_FOUND
    assert answer["body"].endswith(proxy._NO_ROUTE_TEXT)


def test_header_names_are_those_of_ray():
    from ray.serve._private import constants

    obeyed = {
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
    }
    assert {name.encode() for name in obeyed} == proxy._OBEYED_HEADERS
    assert {
        constants.SERVE_HTTP_REQUEST_ID_HEADER.encode(),
        constants.SERVE_SESSION_ID.encode(),
    } == proxy._LOGGED_HEADERS


@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\x85", "\u2028", "\x7f"])
def test_unprintable_api_path_is_refused(end):
    head, answer = client_messages(start(200), body(b"all"), path=f"/v1/models{end}")
    assert (head["status"], json.loads(answer["body"])["error"]["code"]) == (400, "invalid_path")
    assert client_messages(start(200), body(b"all"), path=f"/another{end}") == [start(200), body(b"all")]


NEW_KEY = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two certificates and their keys, as bytes by file name."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
        subprocess.run([*NEW_KEY, "-nodes", "-subj", "/CN=localhost", *files], check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def check_certificate(tmp_path, certificates):
    """Return a function that writes a certificate and a key, and checks them."""

    def check(certificate=certificates["one.pem"], key=certificates["one.key"], mode=0o600):
        cert_path, key_path = tmp_path / "cert.pem", tmp_path / "key.pem"
        cert_path.write_bytes(certificate)
        key_path.write_bytes(key)
        key_path.chmod(mode)
        require_certificate(cert_path, key_path)

    return check


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_matching_certificate_and_key_pass(check_certificate, certificates, mode):
    check_certificate(mode=mode)
    check_certificate(certificate=certificates["one.pem"] + certificates["two.pem"])  # a certificate chain


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o602, 0o777])
def test_world_readable_key_is_refused(check_certificate, mode):
    with pytest.raises(ConfigError, match=rf"tls_key .*key\.pem: readable by everyone .* \(mode {mode:04o}\)"):
        check_certificate(mode=mode)


EMPTY_PEM = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("one.pem", "two.key", r"tls_key .*key\.pem: does not match the certificate .*cert\.pem"),
        ("one.key", "one.pem", r"tls_cert .*cert\.pem: contains no certificate"),
        *[(data, "one.key", r"tls_cert .*cert\.pem: contains no certificate") for data in (b"", b"no pem", EMPTY_PEM)],
        *[("one.pem", data, r"tls_key .*key\.pem: contains no private key") for data in (b"", b"no pem")],
    ],
)
def test_wrong_certificate_or_key_is_refused(check_certificate, certificates, certificate, key, message):
    with pytest.raises(ConfigError, match=message):
        check_certificate(certificate=certificates.get(certificate, certificate), key=certificates.get(key, key))


def test_encrypted_key_is_refused_without_a_prompt(check_certificate, tmp_path):
    files = ("-keyout", tmp_path / "encrypted.key", "-out", tmp_path / "encrypted.pem", "-passout", "pass:word")
    subprocess.run([*NEW_KEY, "-subj", "/CN=localhost", *files], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="the key is encrypted"):
        check_certificate(
            certificate=(tmp_path / "encrypted.pem").read_bytes(), key=(tmp_path / "encrypted.key").read_bytes()
        )


def test_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tls_cert .*: Is a directory"):
        require_certificate(tmp_path, tmp_path)


def test_serve_application_refuses_a_certificate(tmp_path):
    with pytest.raises(ConfigError, match="tls_cert") as error:
        build(ServeConfig(tls_cert=tmp_path / "c", tls_key=tmp_path / "k"))
    assert "ssl_certfile" in error.value.hint


@pytest.mark.parametrize("files", [{}, {"tls_cert": "c", "tls_key": "k"}])
def test_url_is_https_with_a_certificate(files):
    assert ServeConfig(**files).url == f"{'https' if files else 'http'}://127.0.0.1:8000/v1"
