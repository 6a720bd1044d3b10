"""Tests that gate and router choose the same route for every path, and that no route answers without the gate.

The tests use the real routes and the application that Ray Serve runs.
"""

import asyncio
import urllib.parse

import httpx
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from starlette.routing import Match

from pipelines.online import ingress
from pipelines.online.errors import ApiError
from pipelines.online.gateway.bodies import JsonBody, ParsePool
from pipelines.online.gateway.gate import Gate, GateSettings
from pipelines.online.gateway.routes import PASS, GatePass, GuardedRoute, Rule, find_route, guarded_app, post, with_pass
from pipelines.online.wire import path_refusal

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "get", "Post", "")
ROUTES = tuple(ingress._ROUTES.values())
# Parts of an encoded path: line ends, slashes and dots after decoding, and lookalikes of letters.
PATH_PIECES = [
    "%0A", "%0D", "%0D%0A", "%00", "%0B", "%0C", "%85", "%C2%85", "%E2%80%A8", "%E2%80%A9", "%7F", "%1B", "%20", "%09",
    "/", "//", "%2F", "%2f%2f", "/./", "/../", "%2e%2e/", ".", ";x", "?", "%3F", "#", "%23", "%25", "%250A",
    "\\", "%5C", "%C0%AF", "%FF", "%EF%BC%8F", "%C5%BF", "%E2%80%8B", "%EF%BB%BF", "A", "x", "0", "*", ":", "@",
    "{file_id}",
]  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The application behind the gate, with Ray's routes."""
    with pytest.MonkeyPatch.context() as patch:
        apps = []
        make_app = ingress.make_app
        patch.setattr(ingress, "make_app", lambda settings: apps.append(make_app(settings)) or apps[0])
        ingress.make_ingress(GateSettings(models=(), ledger=tmp_path_factory.mktemp("ledger")))
    return apps[0]


@st.composite
def paths(draw):
    """Paths similar to the path of a route: other parameters, insertions, swapped case, encoded letters."""
    path = draw(st.sampled_from(ROUTES)).path
    for name in ("{model:path}", "{name}", "{file_id}", "{batch_id}"):
        path = path.replace(name, draw(st.sampled_from(["x", "a/b", "", "..", "%2F", "content", "x/content", "ä"])))
    for _ in range(draw(st.integers(0, 3))):
        index = draw(st.one_of(st.just(len(path)), st.integers(0, len(path))))
        change = draw(st.sampled_from(["insert", "case", "encode", "cut", "repeat"]))
        if change == "insert":
            path = path[:index] + draw(st.one_of(st.sampled_from(PATH_PIECES), st.text(max_size=2))) + path[index:]
        elif change == "case":
            path = path[:index] + path[index : index + 1].swapcase() + path[index + 1 :]
        elif change == "encode":
            escapes = "".join(f"%{byte:02X}" for byte in path[index : index + 1].encode())
            path = path[:index] + escapes + path[index + 1 :]
        elif change == "cut":
            path = path[:index] + path[index + 1 :]
        else:
            path = path[:index] + path[max(0, index - 8) : index] + path[index:]
    return path


def scope_of(raw_path, method, prefix=""):
    """Return the ASGI scope that uvicorn would make."""
    path = prefix + urllib.parse.unquote(raw_path.partition("?")[0])
    return {"type": "http", "method": method, "path": path, "root_path": prefix, "headers": [], "query_string": b""}


def router_match(app, scope):
    for route in app.router.routes:
        if route.matches(scope)[0] is Match.FULL:
            return scope["method"], route.path
    return None


def gate_match(scope):
    try:
        route = find_route(ROUTES, scope)
    except ApiError:
        return None
    return route.method, route.path


@settings(max_examples=2000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(raw_path=paths(), method=st.sampled_from(METHODS), prefix=st.sampled_from(["", "/peagle", "/v1"]))
@example(raw_path="/v1/chat/completions%0A", method="POST", prefix="")
@example(raw_path="/v1/files/x/content%0A", method="GET", prefix="/peagle")
def test_router_and_gate_match_the_same_route(app, raw_path, method, prefix):
    scope = scope_of(raw_path, method, prefix)
    if path_refusal(scope):
        assume(router_match(app, scope) is not None)  # a path without a route may be refused for any reason
        assert not scope["path"].isprintable()
    else:
        assert router_match(app, scope) == gate_match(scope)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
@pytest.mark.parametrize("end", ["%0A", "%0D", "%0D%0A", "%00", "%C2%85", "%E2%80%A8", "%7F", "%0B", "%1C"])
def test_unprintable_path_is_refused_before_the_key_check(app, route, end):
    path = route.path.partition("{")[0] + ("x" if "{" in route.path else "") + end
    answer = response_to(app, route.method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_path")
    assert "x-peagle-request-id" in answer.headers


def test_every_route_is_guarded(app):
    assert {type(route) for route in app.router.routes} == {GuardedRoute}
    assert {(*route.methods, route.path) for route in app.router.routes} == {
        (entry.method, entry.path) for entry in ROUTES
    }
    assert not app.router.redirect_slashes


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_route_fails_without_the_gates_pass(app, route, caplog):
    """The pass is missing, forged, or for another route (if gate and router parsed the path differently)."""
    other = next(entry for entry in ROUTES if entry.rule is not route.rule)
    scope = scope_of(route.path, route.method)
    forged = True, (route.method, route.path), GatePass(route=(route.method, "")), GatePass(route=("", route.path))
    for wrong_scope in (scope, with_pass(scope, other), *({**scope, PASS: value} for value in forged)):
        with pytest.raises(ApiError) as error:
            asyncio.run(app.router(dict(wrong_scope), fail_on_message, fail_on_message))
        assert error.value.status == 500
    assert "without the gate's pass" in caplog.text


def test_new_routes_are_guarded_by_default():
    app = guarded_app()

    @app.post("/v1/new")
    async def new():
        return "answered"

    with pytest.raises(ApiError):
        asyncio.run(app.router(scope_of("/v1/new", "POST"), fail_on_message, fail_on_message))


def test_handler_gets_the_body_parsed_by_the_gate():
    app, messages = guarded_app(), []
    route = post("/v1/new", Rule.CREATE_BATCH)

    @route(app)
    async def new(body: dict[str, int]) -> dict[str, int]:
        return body

    async def send(message):
        messages.append(message)

    body = JsonBody(values={"a": 1}, num_bytes=8, key="alice", parse_pool=ParsePool())
    scope = scope_of("/v1/new", "POST") | {"headers": [(b"content-type", b"application/json")]}
    asyncio.run(app(with_pass(scope, route, body=body), fail_on_message, send))
    assert (messages[0]["status"], messages[1]["body"]) == (200, b'{"a":1}')


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/batches"])
def test_body_that_the_gate_did_not_read_is_refused(app, path):
    """Otherwise, a route whose rule reads no body would accept a body of any size."""
    (route,) = (entry for entry in ROUTES if (entry.method, entry.path) == ("POST", path))
    with pytest.raises(ApiError) as error:
        asyncio.run(app.router(with_pass(scope_of(path, "POST"), route), fail_on_message, fail_on_message))
    assert error.value.status == 500


def test_websockets_are_refused(tmp_path):
    app, messages = guarded_app(), []

    @app.websocket("/v1/new")
    async def new(socket):
        await socket.accept()

    async def send(message):
        messages.append(message)

    gate = Gate(app, GateSettings(models=(), ledger=tmp_path), ROUTES)
    scope = {"type": "websocket", "path": "/v1/new", "root_path": "", "headers": [], "query_string": b""}
    asyncio.run(gate(scope, fail_on_message, send))
    assert messages == [{"type": "websocket.close", "code": 1008}]


def test_each_route_has_the_expected_rule():
    by_rule = {rule: {(entry.method, entry.path) for entry in ROUTES if entry.rule is rule} for rule in Rule}
    assert by_rule[Rule.OPEN] == {("GET", "/health")}
    public = ("/", "/page/{name}", "/docs", "/docs/{name}", "/openapi.json")
    assert by_rule[Rule.PAGE] == {("GET", path) for path in public}
    assert by_rule[Rule.GENERATION] == {("POST", "/v1/chat/completions"), ("POST", "/v1/completions")}
    assert by_rule[Rule.CREATE_BATCH] == {("POST", "/v1/batches")}
    assert by_rule[Rule.UPLOAD] == {("POST", "/v1/files")}
    assert by_rule[Rule.POLL] == {("GET", "/v1/live"), ("GET", "/v1/cost")}


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/files/", 404), ("POST", "/v1/chat/completions/", 404), ("POST", "//v1/chat/completions", 404),
        ("POST", "/V1/chat/completions", 404), ("HEAD", "/v1/models", 405), ("OPTIONS", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions", 405), ("PUT", "/v1/files/x", 405), ("GET", "/redoc", 404),
    ],
)  # fmt: skip
def test_other_paths_and_methods_are_refused(method, path, expected):
    with pytest.raises(ApiError) as error:
        find_route(ROUTES, scope_of(path, method))
    assert error.value.status == expected


def response_to(app, method, path):
    async def run():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path)

    return asyncio.run(run())


async def fail_on_message(*_):
    raise AssertionError("a message was read or sent")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_unknown_query_parameters_are_refused(app, route):
    (registered_route,) = [
        registered
        for registered in app.router.routes
        if (route.method, route.path) == (next(iter(registered.methods)), registered.path)
    ]
    body = JsonBody(values={}, num_bytes=2, key="k", parse_pool=ParsePool())
    scope = scope_of("/", route.method) | {"query_string": b"form=2026-11-01&limit=1"}
    with pytest.raises(ApiError) as error:
        asyncio.run(registered_route.handle(with_pass(scope, route, body=body), None, None))
    assert (error.value.status, error.value.code, error.value.param) == (422, "unknown_parameter", "form")
    assert ("start" in error.value.message) == (route.path == "/v1/cost")  # the hint lists the path's parameters
