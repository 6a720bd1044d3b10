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


def passed_on(*messages, kind="http", path="/v1/models"):
    """What a client gets when the proxy sends these messages."""
    sent = []

    async def proxy(scope, receive, send):
        for message in messages:
            await send(message)

    async def send(message):
        sent.append(message)

    asyncio.run(Front(proxy)({"type": kind, "path": path}, None, send))
    return sent


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
