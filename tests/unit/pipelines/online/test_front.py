import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pipelines.online import front
from pipelines.online.front import Front, middlewares

OURS = (b"x-peagle-request-id", b"r")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


def start(status, *headers):
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(text=b"", more_body=False):
    return {"type": "http.response.body", "body": text, "more_body": more_body}


def asked(proxy, *, kind="http", path="/v1/models", headers=()):
    """What a client gets through this proxy."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Front(proxy)({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return sent


def passed_on(*messages, error=None, **request):
    """What a client gets when the proxy sends these messages, and then maybe fails."""

    async def proxy(scope, receive, send):
        for message in messages:
            await send(message)
        if error:
            raise error

    return asked(proxy, **request)


def got_through(*headers, **request):
    """Those of a client's headers that the proxy gets."""
    seen = []

    async def proxy(scope, receive, send):
        seen.extend(scope["headers"])

    asked(proxy, headers=headers, **request)
    return seen


def no_route(path):
    """What Ray's proxy says where no application has the path."""
    from ray.serve._private.proxy import HTTPProxy

    async def messages():
        *said, _ = [message async for message in HTTPProxy.not_found_response(None, SimpleNamespace(path=path))]
        return said

    return asyncio.run(messages())


@pytest.mark.parametrize(
    "messages",
    [
        (start(200, OURS), body(b"all")),
        (start(200, OURS, EVENTS), body(b"data: 1\n\n", True), body()),
        (start(503, OURS), body(b"the gate's own")),
        (start(404, OURS), body(b"the gate's own")),
        (start(404), body(b"no such route")),
        (start(404), body(b"of another application, ", True), body(b"in pieces")),
        (start(200, OURS), body(b"half", True)),
    ],
)
def test_what_the_ingress_says_is_passed_on(messages):
    assert passed_on(*messages) == list(messages)


@pytest.mark.parametrize("messages", [(), (start(500), body(b"ActorDiedError: ray::Secret")), (start(503), body(b"x"))])
def test_an_ingress_that_died_is_a_503_of_the_api(messages):
    head, text = passed_on(*messages)
    assert head["status"] == 503
    assert int(dict(head["headers"])[b"retry-after"]) > 0
    assert int(dict(head["headers"])[b"content-length"]) == len(text["body"])
    assert json.loads(text["body"])["error"]["code"] == "overloaded"


@pytest.mark.parametrize("path", ["/v1/models", "/prefix/v1/chat/completions"])
def test_an_endpoint_that_is_not_there_is_a_503_with_which_clients_ask_again(path):
    messages = no_route(path)
    assert messages[0]["status"] == 404
    head, text = passed_on(*messages, path=path)
    assert head["status"] == 503
    assert int(dict(head["headers"])[b"retry-after"]) > 0
    assert json.loads(text["body"])["error"]["code"] == "overloaded"


@pytest.mark.parametrize("path", ["/", "/another/application"])
def test_a_path_that_is_not_the_apis_may_not_be_there(path):
    messages = no_route(path)
    assert passed_on(*messages, path=path) == messages


def test_a_stream_that_breaks_off_ends_with_an_error_event():
    begun = [start(200, OURS, EVENTS), body(b"data: 1\n\n", True)]
    *first, last = passed_on(*begun)
    assert first == begun
    assert not last["more_body"]
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", ["/v1/models", "/another/application"])
def test_a_proxy_that_fails_is_a_503(path):
    head, text = passed_on(error=KeyError("Secret"), path=path)
    assert head["status"] == 503
    assert json.loads(text["body"])["error"]["code"] == "overloaded"


def test_a_stream_in_which_the_proxy_fails_ends_with_an_error_event():
    begun = [start(200, OURS, EVENTS), body(b"data: 1\n\n", True)]
    *first, last = passed_on(*begun, error=KeyError("Secret"))
    assert first == begun
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    "messages",
    [
        (start(500), body(b"its own page")),
        (start(503, EVENTS), body(b"in ", True), body(b"pieces")),
        (start(200, EVENTS), body(b"data: 1\n\n", True)),
    ],
)
def test_what_another_application_says_is_its_own(messages):
    assert passed_on(*messages, path="/another/application") == list(messages)


def test_what_the_gate_has_signed_is_the_endpoints_wherever_it_is():
    *_, last = passed_on(start(200, OURS, EVENTS), body(b"data: 1\n\n", True), path="/elsewhere")
    assert b"overloaded_error" in last["body"]


@pytest.fixture
def control():
    """The headers that Ray's proxy reads: those that it obeys, and those that it notes."""
    from ray.serve._private import constants as ray

    obeyed = [
        ray.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        ray.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        ray.SERVE_MULTIPLEXED_MODEL_ID,
        ray.SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
    ]
    noted = [ray.SERVE_HTTP_REQUEST_ID_HEADER, ray.SERVE_SESSION_ID, ray.SERVE_SESSION_ID.replace("-", "_")]
    return [name.encode() for name in obeyed], [name.encode() for name in noted]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_nobody_but_another_applications_client_gives_the_proxy_orders(control, kind):
    obeyed, noted = ([(name, "é".encode()) for name in names] for names in control)
    assert got_through(*obeyed, *noted, kind=kind) == noted
    assert got_through(*obeyed, *noted, kind=kind, path="/another/application") == [*obeyed, *noted]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_the_proxy_gets_nothing_to_read_that_is_no_text(control, kind, path):
    other = (b"x-other", b"\xff")
    unreadable = [(name, b"\xff") for names in control for name in names]
    assert got_through(*unreadable, other, kind=kind, path=path) == [other]


def test_what_is_no_request_is_left_alone():
    assert passed_on({"type": "lifespan.startup.complete"}, kind="lifespan") == [{"type": "lifespan.startup.complete"}]


def test_ray_finds_it_by_its_name(monkeypatch):
    from uvicorn.protocols.http import auto

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # which it changes
    module, _, name = front.IMPORT_PATH.partition(":")
    assert (module, name) == (front.__name__, "middlewares")
    (middleware,) = middlewares()
    assert middleware.cls is Front


def test_rays_limit_for_an_answer_is_none_beside_ours():
    """It is read when Ray's module is imported, so in a process that is started with it."""
    script = "from ray.llm._internal.serve.constants import DEFAULT_LLM_ROUTER_HTTP_TIMEOUT as s; print(s)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | front.ENVIRONMENT, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 30 * 24 * 3600


@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\x85", "\u2028", "\x7f"])
def test_the_proxy_never_sees_a_path_of_the_api_that_cannot_be_printed(end):
    head, answer = passed_on(start(200), body(b"all"), path=f"/v1/models{end}")
    assert (head["status"], json.loads(answer["body"])["error"]["code"]) == (400, "invalid_path")
    assert passed_on(start(200), body(b"all"), path=f"/another{end}") == [start(200), body(b"all")]
