import asyncio
import json
import math
import stat
import time
import tracemalloc

import httpx
import pytest

from peagle.economics.ledger import append_request
from pipelines.online.gateway import routes as route_rules
from pipelines.online.gateway.admission import TEMPLATE_TOKENS, ServedModel
from pipelines.online.gateway.crashes import EngineCrashes
from pipelines.online.gateway.gate import Gate, GateSettings, to_api_request
from pipelines.online.gateway.keys import KeyRing, new_key, read_keys, write_keys
from pipelines.online.gateway.outgoing import Load
from pipelines.online.gateway.routes import PASS
from pipelines.online.totals import totals_of
from pipelines.online.wire import Context, header
from tests.unit.pipelines.online.ledgers import make_request_usage

CHAT = "/v1/chat/completions"
ROUTES = (
    route_rules.post(CHAT, route_rules.Rule.GENERATION),
    route_rules.post("/v1/completions", route_rules.Rule.GENERATION),
    route_rules.post("/v1/batches", route_rules.Rule.CREATE_BATCH),
    route_rules.post("/v1/files", route_rules.Rule.UPLOAD),
    route_rules.post("/v1/batches/{batch_id}/cancel"),
    route_rules.get("/v1/cost", route_rules.Rule.POLL),
    route_rules.get("/v1/models"),
    route_rules.get("/v1/live", route_rules.Rule.POLL),
    route_rules.get("/health", route_rules.Rule.OPEN),
    route_rules.get("/", route_rules.Rule.PAGE),
    route_rules.get("/page/{name}", route_rules.Rule.PAGE),
)
TOOL = {"type": "function", "function": {"name": "f"}}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
SUMMARY = {"usd": 0.25, "ttft_s": None, "acceptance_length": 1.5}
REPORTED = {"usage": USAGE, "peagle": SUMMARY}
EVENTS = [
    {"choices": [{"delta": {"content": "Hello"}}]},
    {"choices": [], "usage": USAGE, "peagle": SUMMARY},
]


class FakeEngineApp:
    """An application that answers like a replica, and records the request."""

    def __init__(self, *, error=None, fails_late=False):
        self.error, self.fails_late = error, fails_late
        self.forwarded, self.headers, self.context, self.gate_pass, self.scope = None, {}, None, None, {}

    async def __call__(self, scope, receive, send):
        if self.error:
            raise self.error
        self.scope = scope
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.context = Context.of(self.headers)
        self.gate_pass = gate_pass = scope[PASS]  # the gate adds it to requests that it accepts
        self.forwarded = gate_pass.body.values if gate_pass.body else {}
        if scope["method"] == "POST" and not gate_pass.body:
            await receive()
        is_stream = self.forwarded.get("stream")
        content_type = b"text/event-stream" if is_stream else b"application/json"
        if not is_stream and gate_pass.record_usage:
            gate_pass.record_usage(REPORTED)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
        if not is_stream:
            body = json.dumps({"choices": [], "usage": USAGE, "peagle": SUMMARY}).encode()
            await send({"type": "http.response.body", "body": body})
            return
        await send({"type": "http.response.body", "body": encode_event(EVENTS[0]), "more_body": True})
        if self.fails_late:
            raise RuntimeError("secret detail")
        gate_pass.record_usage(REPORTED)
        await send(
            {"type": "http.response.body", "body": encode_event(EVENTS[1]) + b"data: [DONE]\n\n", "more_body": True}
        )
        await send({"type": "http.response.body", "body": b""})


def encode_event(event):
    return f"data: {json.dumps(event)}\n\n".encode()


@pytest.fixture
def keys(tmp_path):
    secret_keys = {}
    records = []
    for name, limits in {
        "alice": {},
        "slow": {"requests_per_min": 1},
        "small": {"output_tokens_per_min": 100, "budget_usd": 0.2},
        "other": {"models": ["b"]},
        "tagged": {"tags": {"team": "search"}, "request_tags": ["project", "team"]},
        "boss": {"is_operator": True},
    }.items():
        secret_keys[name], record = new_key(name, **limits)
        records.append(record)
    write_keys(tmp_path / "keys.json", records)
    return secret_keys


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "ledger").mkdir()
    return {
        "models": (ServedModel(name="a", max_model_len=1000, drafter="head", num_speculative_tokens=3),
                   ServedModel(name="b", max_model_len=1000, can_seed=False, max_choices=8, vocab_size=100,
                               parsers=frozenset())),
        "ledger": tmp_path / "ledger",
        "key_file": tmp_path / "keys.json",
        "max_body_bytes": 2000,
        "body_timeout_s": 0.2,
        "refusals_per_s": math.inf,
    }  # fmt: skip


@pytest.fixture
def engine():
    return FakeEngineApp()


@pytest.fixture
def call_gate(settings, keys, engine):
    """Return a function that sends requests, one after the other, through a gate to `app` (default: `engine`)."""

    def send(
        *requests,
        app=None,
        client=("127.0.0.1", 1),
        load=None,
        crashes=None,
        prefix="",
        host="localhost",
        **changes,
    ):
        async def run():
            totals_of.cache_clear()  # in production, a process has only one gate
            gate = Gate(app or engine, GateSettings(**{**settings, **changes}), ROUTES, load, crashes)
            sender = httpx.ASGITransport(app=gate, client=client, root_path=prefix)
            async with httpx.AsyncClient(transport=sender, base_url=f"http://{host}") as http:
                return [await http.request(*args, **kwargs) for args, kwargs in requests]

        return asyncio.run(run())

    return send


def messages_from(gate, *messages, key, path=CHAT):
    """Return the messages that the gate sends to the ASGI server for a request, without the bodies."""
    unread, sent = list(messages), []

    async def receive():
        return unread.pop(0)

    async def send(message):
        sent.append({name: value for name, value in message.items() if name != "body"})

    headers = [(b"authorization", f"Bearer {key}".encode())]
    asyncio.run(gate({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send))
    return sent


def post(key=None, *, path=CHAT, headers=None, raw=None, **body):
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    prompt = {"prompt": "x"} if path.endswith("/completions") and not path.endswith(CHAT) else {"messages": []}
    content = raw if raw is not None else json.dumps({"model": "a"} | prompt | body)
    return ("POST", path), {"content": content, "headers": authorization | (headers or {})}


def get(path, key=None):
    return ("GET", path), {"headers": {"authorization": f"Bearer {key}"} if key else {}}


def nested(depth, opening, closing):
    return opening * depth + '"a"' + closing * depth


def error_of(response):
    return response.status_code, response.json()["error"]["code"]


def test_only_keys_that_crash_engines_are_limited(call_gate, keys, settings):
    crashes = EngineCrashes()
    account = KeyRing(settings["key_file"], ()).find(keys["alice"]).account
    for number in range(2):  # two crashes, each attributed to a request of alice
        crashes._attribute(crashes.start(request_id=f"r{number}", key="alice", account=account, model="a"))
    refused, read, other = call_gate(
        post(keys["alice"]), get("/v1/models", keys["alice"]), post(keys["boss"]), crashes=crashes
    )
    assert error_of(refused) == (429, "engine_crashes")
    assert 299 <= int(refused.headers["retry-after"]) <= 300  # the limit lasts 300 s
    assert (read.status_code, other.status_code) == (200, 200)


def test_answer_headers_contain_the_cost(call_gate, keys):
    (answer,) = call_gate(post(keys["alice"]))
    assert answer.status_code == 200
    assert answer.json()["usage"] == USAGE
    assert answer.headers["x-peagle-usd"] == "0.25"
    assert answer.headers["x-peagle-acceptance-length"] == "1.5"
    assert answer.headers["x-peagle-drafter"] == "head"
    assert answer.headers["x-peagle-num-speculative-tokens"] == "3"
    assert len(answer.headers["x-peagle-request-id"]) == 32


def test_large_answer_is_neither_buffered_nor_parsed(settings, keys):
    """The answer is 40 MiB long and is not JSON. The gate must buffer only a small part."""
    piece, num_pieces, buffered_bytes = b"x" * 2**20, 40, []

    async def large(scope, receive, send):
        scope[PASS].record_usage(REPORTED)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_pieces):
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
        buffered_bytes.append(tracemalloc.get_traced_memory()[0] - before)
        await send({"type": "http.response.body", "body": b""})

    gate, body = Gate(large, GateSettings(**settings), ROUTES), b'{"model": "a", "messages": []}'
    tracemalloc.start()
    try:
        start, *_ = messages_from(gate, {"type": "http.request", "body": body}, key=keys["alice"])
    finally:
        tracemalloc.stop()
    assert dict(start["headers"])[b"x-peagle-usd"] == b"0.25"
    assert buffered_bytes[0] < 5 * 2**20


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic x"}, {"authorization": "Bearer "}])
def test_missing_key_is_401(call_gate, headers):
    for path in (CHAT, "/v1/models", "/v1/cost", "/openapi.json"):
        (answer,) = call_gate(post(path=path, headers=headers))
        assert error_of(answer) == (401, "missing_api_key")


def test_invalid_key_is_401_and_health_needs_none(call_gate):
    wrong, health = call_gate(post("pk-wrong"), get("/health"))
    assert error_of(wrong) == (401, "invalid_api_key")
    assert wrong.json()["error"]["type"] == "authentication_error"
    assert health.status_code == 200


def test_page_is_public_with_keys_and_only_local_without_keys(call_gate):
    for path in ("/", "/page/app.js"):
        assert call_gate(get(path))[0].status_code == 200
        without_keys = {"requires_key": False, "key_file": None}
        assert call_gate(get(path), **without_keys)[0].status_code == 200
        assert error_of(call_gate(get(path), client=("10.0.0.7", 1), **without_keys)[0]) == (403, "not_local")
    assert error_of(call_gate((("POST", "/"), {}))[0]) == (401, "missing_api_key")


def test_without_keys_other_machines_are_refused(call_gate):
    without_keys = {"requires_key": False, "key_file": None}
    assert call_gate(post(), **without_keys)[0].status_code == 200
    assert call_gate(post(), client=("::1", 1), **without_keys)[0].status_code == 200
    for client in (("10.0.0.7", 1), ("", 0), None):
        assert error_of(call_gate(post(), client=client, **without_keys)[0]) == (403, "not_local")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000"])
def test_without_keys_other_sites_are_refused(call_gate, host):
    def status_or_error(request, host=host, **headers):
        arguments, kwargs = request
        (answer,) = call_gate((arguments, {**kwargs, "headers": headers}), host=host, requires_key=False, key_file=None)
        return 200 if answer.status_code == 200 else error_of(answer)

    for request in (get("/"), get("/v1/cost"), post()):
        assert status_or_error(request) == status_or_error(request, origin=f"http://{host}") == 200
        for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]"):
            assert status_or_error(request, host=name) == (403, "not_local")
            assert status_or_error(request, origin=f"http://{name}") == (403, "not_local")
        assert status_or_error(request, origin="null") == (403, "not_local")


def test_with_keys_any_host_name_is_allowed(call_gate, keys):
    (answer,) = call_gate(post(keys["alice"], headers={"origin": "https://app.example"}), host="peagle.example")
    assert answer.is_success


BEHIND_SAGEMAKER = {"is_behind_sagemaker": True, "requires_key": False, "key_file": None, "client": ("169.254.1.1", 1)}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("has_route", [True, False])
def test_invocations_route_is_mapped_to_the_api(call_gate, path, has_route, engine):
    prompt = {"prompt": "x"} if path != CHAT else {"messages": []}
    headers = {"x-amzn-sagemaker-custom-attributes": f"route={path}"} if has_route else {}
    (answer,) = call_gate(
        post(path="/invocations", headers=headers, raw=json.dumps({**prompt, "model": "a", "stream": True})),
        host="container",
        **BEHIND_SAGEMAKER,
    )
    assert answer.status_code == 200
    assert (engine.gate_pass.route, engine.scope["path"]) == (("POST", path), path)
    assert engine.forwarded["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert engine.forwarded.get("max_tokens") == (16 if path != CHAT else None)
    assert (engine.context.key, answer.headers["x-peagle-model"]) == ("local", "a")
    assert not {name for name in engine.headers if "sagemaker" in name}


def test_invocations_route_reads_the_key_from_the_attributes(call_gate, keys):
    def invocation(attributes, **fields):
        headers = {"x-amzn-sagemaker-custom-attributes": attributes}
        return ("POST", "/invocations"), {"headers": headers, "content": json.dumps({"model": "a", **fields})}

    with_keys = BEHIND_SAGEMAKER | {"requires_key": True}
    del with_keys["key_file"]  # then it is that of the fixture `settings`
    answers = call_gate(
        invocation("", messages=[]),
        invocation(f"key={keys['slow']}", messages=[]),
        invocation(f"key={keys['slow']}", messages=[]),
        invocation(f"key={keys['alice']},route=/v1/cost"),
        invocation(f"key={keys['alice']},route=/v1/cost,method=GET"),
        invocation(f"key={keys['alice']},route=/v1/nothing"),
        invocation(f"key={keys['alice']}"),
        **with_keys,
    )
    assert [answer.status_code for answer in answers] == [401, 200, 429, 405, 200, 404, 400]
    assert error_of(answers[-1]) == (400, "missing_route")


def test_invocations_route_exists_only_on_sagemaker(call_gate, keys):
    headers = {"x-amzn-sagemaker-custom-attributes": f"key={keys['alice']},route={CHAT}"}
    without_key, with_key = call_gate(
        post(path="/invocations", headers=headers), post(keys["alice"], path="/invocations")
    )
    assert (error_of(without_key), error_of(with_key)) == ((401, "missing_api_key"), (404, "unknown_url"))


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
@pytest.mark.parametrize(
    ("path", "is_json"),
    [
        (CHAT, True),
        ("/v1/completions", True),
        ("/v1/batches", True),
        ("/v1/files", False),
        ("/v1/batches/x/cancel", False),
    ],
)
def test_content_type_of_forwarded_bodies(call_gate, keys, path, is_json, headers, engine):
    assert call_gate(post(keys["alice"], path=path, headers=headers))[0].is_success
    forwarded_type = "application/json" if is_json else headers.get("content-type")
    assert engine.headers.get("content-type") == forwarded_type


@pytest.mark.parametrize(
    ("key", "header", "tags"),
    [
        ("alice", None, {"site": "lab"}),
        ("tagged", None, {"site": "lab", "team": "search"}),
        ("tagged", "project=x, team=ads", {"project": "x", "site": "lab", "team": "ads"}),
    ],
)
def test_request_has_the_tags_of_endpoint_key_and_header(call_gate, keys, key, header, tags, engine):
    call_gate(post(keys[key], headers={"X-Peagle-Tags": header} if header else {}), tags={"site": "lab"})
    assert json.loads(engine.context.tags) == tags


@pytest.mark.parametrize(
    ("key", "header", "expected"),
    [
        ("alice", "project=x", (403, "tag_not_allowed")),
        ("tagged", "site=x", (403, "tag_not_allowed")),
        ("tagged", "project", (400, "invalid_value")),
        ("tagged", "project=\x7f", (400, "invalid_value")),
        ("tagged", "project=" + "x" * 200, (400, "invalid_value")),
    ],
)
def test_invalid_or_forbidden_tags_are_refused(call_gate, keys, key, header, expected):
    (answer,) = call_gate(post(keys[key], headers={"X-Peagle-Tags": header}))
    assert error_of(answer) == expected


def test_without_keys_every_tag_is_allowed(call_gate, engine):
    call_gate(post(headers={"X-Peagle-Tags": "project=x"}), requires_key=False, key_file=None)
    assert json.loads(engine.context.tags) == {"project": "x"}


def test_clients_cannot_set_internal_headers(call_gate, keys, engine):
    # `first_asked_at` is set if the request was in an engine that crashed.
    forged = Context(request_id="x", key="boss", account="boss", num_choices=0, cap_tokens=9, first_asked_at=1.0)
    client_headers = {**forged.headers(), "X-Vllm-Priority": "9", "a": "b", "x_session_id": "s", "x-peagle-key": "boss"}
    for request in (
        post(keys["alice"], headers=client_headers, n=2),
        post(keys["alice"], headers=client_headers, n=2, stream=True),
    ):
        (answer,) = call_gate(request)
        context = engine.context
        assert (context.key, context.num_choices, context.cap_tokens) == ("alice", 2, None)
        assert context.account.startswith("alice 1")  # an account is the key's name and creation time
        assert context.request_id == engine.headers["x-request-id"] == answer.headers["x-peagle-request-id"]
        assert len(context.request_id) == 32
        assert (context.shown_usage, context.first_asked_at) == ("never", None)
        assert engine.headers["a"] == "b"
        assert {name for name in engine.headers if name.startswith("x")} == {"x-peagle-context", "x-request-id"}
        assert "authorization" not in engine.headers
    arguments, kwargs = get("/v1/cost", keys["alice"])
    (answer,) = call_gate((arguments, {"headers": {**client_headers, **kwargs["headers"]}}))
    assert (engine.context, engine.gate_pass.key.name, engine.gate_pass.key.is_operator) == (None, "alice", False)
    assert engine.headers["x-request-id"] == answer.headers["x-peagle-request-id"]
    call_gate(get("/v1/cost", keys["boss"]))
    assert (engine.gate_pass.key.name, engine.gate_pass.key.is_operator) == ("boss", True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"raw": "{"}, (400, "invalid_json")),
        ({"raw": "[" * 1000}, (400, "invalid_json")),
        ({"raw": '{"model": "a", "prompt": "x", "temperature": NaN}'}, (400, "invalid_json")),
        ({"raw": '{"model": "a", "prompt": "x", "temperature": 1e999}'}, (400, "invalid_json")),
        ({"raw": '{"model": "a", "prompt": "\\ud800"}'}, (400, "invalid_json")),
        ({"raw": '{"model": "a", "messages": [], "\\uD800": 1}'}, (400, "invalid_json")),
        ({"raw": '{"model": "\\ud800"}'}, (400, "invalid_json")),
        ({"temprature": 1}, (400, "unknown_parameter")),
        ({"prompt": "x"}, (400, "unknown_parameter")),
        ({"best_of": 1, "path": "/v1/completions", "messages": []}, (400, "unknown_parameter")),
        ({"best_of": 2, "path": "/v1/completions"}, (400, "unsupported_parameter")),
        ({"use_beam_search": True}, (400, "unsupported_parameter")),
        ({"functions": [{"name": "f"}]}, (400, "unsupported_parameter")),
        ({"chat_template": "x"}, (400, "unsupported_parameter")),
        ({"kv_transfer_params": {}}, (400, "unsupported_parameter")),
        ({"ec_transfer_params": {}, "path": "/v1/completions"}, (400, "unsupported_parameter")),
        ({"prompt_embeds": "AAAA", "path": "/v1/completions"}, (400, "unsupported_parameter")),
        ({"mm_processor_kwargs": {"size": 1}}, (400, "unsupported_parameter")),
        ({"media_io_kwargs": {"video": {}}}, (400, "unsupported_parameter")),
        ({"raw": "[]"}, (422, "invalid_type")),
        ({"stream": "yes"}, (422, "invalid_type")),
        ({"max_tokens": "9"}, (422, "invalid_type")),
        ({"max_tokens": True}, (422, "invalid_type")),
        ({"max_tokens": -1}, (400, "invalid_value")),
        ({"max_tokens": 0}, (400, "invalid_value")),
        ({"max_completion_tokens": 0}, (400, "invalid_value")),
        ({"n": 0}, (400, "invalid_value")),
        ({"max_tokens": 0, "echo": True}, (400, "invalid_value")),
        ({"path": "/v1/completions", "max_tokens": 0}, (400, "invalid_value")),
        ({"path": "/v1/completions", "max_tokens": 0, "echo": "yes"}, (400, "invalid_value")),
        ({"path": "/v1/completions", "max_tokens": -1, "echo": True}, (400, "invalid_value")),
        ({"path": "/v1/completions", "max_tokens": 0, "n": 0, "echo": True}, (400, "invalid_value")),
        ({"max_completion_tokens": 1001}, (400, "max_tokens_too_large")),
        ({"model": 3}, (422, "invalid_type")),
        ({"model": "b", "seed": 1}, (400, "unsupported_value")),
        ({"model": "b", "logit_bias": {"100": 1}}, (400, "invalid_value")),
        ({"model": "b", "tools": [TOOL]}, (400, "unsupported_value")),
        ({"model": "b", "tools": [TOOL], "tool_choice": "required"}, (400, "unsupported_value")),
        ({"model": "b", "tools": [TOOL], "tool_choice": {"type": "function"}}, (400, "unsupported_value")),
        ({"model": "b", "thinking_token_budget": 5}, (400, "unsupported_value")),
        ({"model": "c"}, (404, "model_not_found")),
        ({"model": None}, (400, "missing_model")),
        ({"raw": "x" * 2001}, (413, "body_too_large")),
        ({"raw": '{"a": ' + nested(100, "[", "]") + "}"}, (400, "too_deep")),
        ({"raw": nested(101, '{"a": ', "}")}, (400, "too_deep")),
        ({"stop_token_ids": [1] * 101, "min_tokens": 1}, (400, "invalid_value")),
    ],
)
def test_invalid_request_does_not_reach_an_engine(call_gate, keys, body, expected, engine):
    (answer,) = call_gate(post(keys["alice"], **body))
    assert error_of(answer) == expected
    assert engine.forwarded is None


def test_error_names_the_missing_parser(call_gate, keys):
    refused, *accepted = call_gate(
        post(keys["boss"], model="b", tools=[TOOL], tool_choice="auto"),
        post(keys["boss"], model="b", tools=[TOOL], tool_choice="none"),
        post(keys["boss"], model="b", thinking_token_budget=-1),
        post(keys["boss"], model="a", tools=[TOOL], thinking_token_budget=5),
    )
    error = refused.json()["error"]
    assert error["param"] == "tool_choice"
    assert "tool_call_parser" in error["message"]
    assert "--" not in error["message"]  # clients cannot change command-line options
    assert [answer.status_code for answer in accepted] == [200, 200, 200]


@pytest.mark.parametrize("path", [CHAT, "/v1/batches", "/v1/files"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, deflate", "x" * 5000])
def test_encoded_body_is_refused(call_gate, keys, path, encoding, engine):
    (answer,) = call_gate(post(keys["alice"], path=path, headers={"content-encoding": encoding}))
    assert error_of(answer) == (415, "unsupported_encoding")
    assert (answer.json()["error"]["param"], engine.forwarded) == ("Content-Encoding", None)
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"
    (answer,) = call_gate(post(keys["alice"], path=path, headers={"content-encoding": "identity"}))
    assert answer.status_code == 200


def test_head_is_get_without_a_body(call_gate, keys):
    authorized = {"headers": {"authorization": f"Bearer {keys['alice']}"}}
    get_response, head, health, without_key, unknown_path, wrong_method = call_gate(
        get("/v1/models", keys["alice"]),
        (("HEAD", "/v1/models"), authorized),
        (("HEAD", "/health"), {}),
        (("HEAD", "/v1/models"), {}),
        (("HEAD", "/v1/nothing"), authorized),
        (("HEAD", CHAT), authorized),
    )
    assert (get_response.status_code, head.status_code, health.status_code) == (200, 200, 200)
    assert (without_key.status_code, unknown_path.status_code) == (401, 404)
    assert head.headers.keys() == get_response.headers.keys()
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert [response.content for response in (head, health, without_key, unknown_path, wrong_method)] == [b""] * 5
    (wrong_method,) = call_gate((("PUT", "/v1/models"), authorized))
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "GET, HEAD")


def salt_of(call_gate, request, **settings):
    engine = FakeEngineApp()
    assert call_gate(request, app=engine, **settings)[0].status_code == 200
    return engine.forwarded.get("cache_salt")


def test_prefix_cache_is_separate_per_key(call_gate, keys):
    """vLLM shares prefixes only within a salt. Clients can neither set a salt nor guess the salt of another key."""
    secret = {"cache_secret": b"s" * 32}
    alice, boss = (salt_of(call_gate, post(keys[name]), **secret) for name in ("alice", "boss"))
    assert len(alice) == len(boss) == 64
    assert alice != boss
    for path in (CHAT, "/v1/completions"):
        forged = post(keys["alice"], path=path, cache_salt=boss)
        assert salt_of(call_gate, forged, **secret) == alice
    assert salt_of(call_gate, post(keys["alice"]), cache_secret=b"t" * 32) != alice
    # The secret is not logged.
    assert b"ssss" not in repr(GateSettings(models=(), ledger=None, **secret)).encode()


def test_no_cache_salt_if_keys_share_the_cache_or_are_disabled(call_gate, keys):
    for gate_settings in ({"shares_prefix_cache": True}, {"requires_key": False, "key_file": None}):
        assert salt_of(call_gate, post(keys["alice"], cache_salt="mine"), **gate_settings) is None


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_clients_cannot_set_request_id_or_priority(call_gate, keys, path, engine):
    fields = {"request_id": "another's", "session_id": "another's", "priority": 0, "vllm_xargs": None}
    assert call_gate(post(keys["alice"], path=path, **fields))[0].status_code == 200
    assert not {"request_id", "session_id"} & set(engine.forwarded)
    for field, value in {"priority": -1, "vllm_xargs": {"session_id": "x"}}.items():
        assert error_of(call_gate(post(keys["alice"], path=path, **{field: value}))[0]) == (
            400,
            "unsupported_parameter",
        )


def test_fields_without_effect_are_dropped(call_gate, keys, engine):
    """Null is accepted for every field, even if vLLM's type does not allow null."""
    without_effect = {
        "best_of": 1,
        "suffix": "",
        "use_beam_search": False,
        "length_penalty": 1.0,
        "n": None,
        "echo": None,
    }
    assert call_gate(post(keys["alice"], path="/v1/completions", **without_effect))[0].status_code == 200
    assert not without_effect.keys() & engine.forwarded.keys()
    assert call_gate(post(keys["alice"], unknown_field=None))[0].status_code == 200
    forwarded = {"tool_choice": "none", "parallel_tool_calls": False, "top_k": -1, "stream": False}
    assert call_gate(post(keys["alice"], **forwarded, tools=[], functions=[], metadata=None))[0].status_code == 200
    assert forwarded.items() <= engine.forwarded.items()
    assert not {"tools", "functions", "metadata"} & engine.forwarded.keys()


@pytest.mark.parametrize(
    ("number", "quoted"),
    [(str(2**63), str(2**63)), (str(-(2**63) - 1), str(-(2**63) - 1)), ("9" * 1500, "9" * 40 + "... (1500 digits)")],
)
def test_integers_beyond_64_bits_are_refused(call_gate, keys, number, quoted, engine):
    raw = f'{{"model": "a", "messages": [], "logit_bias": {{"1": {number}}}}}'
    (answer,) = call_gate(post(keys["alice"], raw=raw))
    assert error_of(answer) == (400, "invalid_value")
    assert f"the number {quoted} is too large" in answer.json()["error"]["message"]
    assert engine.forwarded is None


def test_deepest_allowed_body_passes(call_gate, keys, engine):
    call_gate(post(keys["alice"], raw='{"model": "a", "messages": [], "metadata": ' + nested(99, "[", "]") + "}"))
    assert engine.forwarded is not None


@pytest.mark.parametrize(
    ("field", "limit"), [("allowed_token_ids", 1024), ("logit_bias", 1024), ("stop_token_ids", 100)]
)
def test_number_of_token_ids_is_limited(call_gate, keys, field, limit):
    def ids(number):
        return {str(token_id): 0 for token_id in range(number)} if field == "logit_bias" else list(range(number))

    requests = [post(keys["alice"], **{field: ids(number), "min_tokens": 1}) for number in (limit + 1, limit)]
    too_many, allowed = call_gate(*requests, max_body_bytes=50_000)
    assert (error_of(too_many), allowed.status_code) == ((400, "invalid_value"), 200)


def test_stop_token_ids_are_unlimited_without_min_tokens(call_gate, keys):
    assert call_gate(post(keys["alice"], stop_token_ids=list(range(101))))[0].status_code == 200


@pytest.mark.parametrize("prefix", ["", "/peagle"])
def test_checks_apply_under_any_route_prefix(call_gate, keys, prefix):
    def status_or_error(request, **settings):
        (answer,) = call_gate(request, prefix=prefix, **settings)
        return answer.status_code if answer.status_code < 400 else error_of(answer)

    chat, engine = prefix + CHAT, FakeEngineApp()
    assert status_or_error(post(keys["other"], path=chat)) == (403, "model_not_allowed")
    assert status_or_error(post(keys["alice"], path=prefix + "/v1/completions", max_tokens=1001)) == (
        400,
        "max_tokens_too_large",
    )
    for path in (chat, prefix + "/v1/batches"):
        assert status_or_error(post(keys["alice"], path=path, raw="x" * 2001)) == (413, "body_too_large")
    assert status_or_error(post(keys["alice"], path=prefix + "/v1/files", raw="x" * 30), max_upload_bytes=20) == (
        413, "body_too_large",
    )  # fmt: skip
    first, second = call_gate(*[post(keys["small"], path=chat)] * 2, app=engine, prefix=prefix)
    assert engine.context.cap_tokens == 100
    assert (first.headers["x-peagle-usd"], error_of(second)) == ("0.25", (429, "insufficient_quota"))
    assert [status_or_error(get(prefix + path)) for path in ("/", "/page/app.js", "/health")] == [200] * 3
    assert status_or_error(get(prefix + "/v1/cost")) == (401, "missing_api_key")


def test_body_without_content_length_is_limited(call_gate, keys):
    async def endless_body():
        for _ in range(100):
            yield b"x" * 100

    (answer,) = call_gate(
        (("POST", CHAT), {"content": endless_body(), "headers": {"authorization": f"Bearer {keys['alice']}"}})
    )
    assert error_of(answer) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(("more_body", "connection"), [(True, "close"), (False, None)])
def test_connection_closes_after_an_unread_upload(settings, keys, more_body, connection):
    """The application answers before it has read the whole body, as it does if the body is not a form."""

    async def application(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = Gate(application, GateSettings(**settings), ROUTES)
    piece = {"type": "http.request", "body": b"x", "more_body": more_body}
    start, *_ = messages_from(gate, piece, key=keys["alice"], path="/v1/files")
    assert start["status"] == 400
    assert dict(start["headers"]).get(b"connection") == (connection and connection.encode())


COUNTED_REQUESTS = [
    (post(raw="{"), 400), (post(model="b"), 200), (post(model="c"), 404), (post(raw="[]"), 422),
    (post(raw="x" * 3000), 413), (get("/v1/nothing"), 404), (get("/v1/models"), 200),
    (get("/v1/files"), 405), ((("DELETE", "/v1/cost"), {}), 405), ((("OPTIONS", CHAT), {}), 405),
    (post(path="/v1/batches/x/cancel"), 200), (post(path="/v1/batches", raw="x" * 3000), 413),
    (post(path="/v1/files", raw="x", headers={"content-length": str(10**9)}), 413), (post(max_tokens=10**6), 400),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "status"), COUNTED_REQUESTS)
def test_every_request_counts_toward_the_rate_limit(call_gate, keys, request_, status):
    """Refused requests, reads, deletes and cancellations count, too, because they take the gate's time."""
    arguments, kwargs = request_
    kwargs = {**kwargs, "headers": {**kwargs.get("headers", {}), "authorization": f"Bearer {keys['slow']}"}}
    first, second = call_gate((arguments, kwargs), post(keys["slow"]))
    assert first.status_code == status
    assert error_of(second) == (429, "rate_limit_exceeded")


def test_polling_has_its_own_rate_limit(call_gate, keys):
    poll_requests = [get(url, keys["slow"]) for url in ("/v1/live", "/v1/cost")]
    *polls, answered, refused = call_gate(*poll_requests * 30, poll_requests[0], post(keys["slow"]), post(keys["slow"]))
    assert [poll.status_code for poll in polls] == [200] * 60 + [429]
    assert (answered.status_code, error_of(refused)) == (200, (429, "rate_limit_exceeded"))


def test_request_reserves_cost_at_recent_prices(call_gate, keys, settings):
    available_usd = []

    class RecordingEngine(FakeEngineApp):
        async def __call__(self, *asgi):
            budgets = totals_of(settings["ledger"]).budgets
            available_usd.append(budgets.reserve_batch("batch_1", account, 0.2))  # reserves all that is left
            budgets.settle_batch("batch_1", [account], 0)
            await super().__call__(*asgi)

    account = next(record.account for record in read_keys(settings["key_file"]) if record.name == "small")
    append_request(settings["ledger"], make_request_usage(key="alice", model="a"))
    call_gate(post(keys["small"], model="b", max_tokens=1), app=RecordingEngine())
    call_gate(post(keys["small"], max_tokens=1), app=RecordingEngine())
    num_bytes = len(json.dumps({"model": "a", "messages": [], "max_tokens": 1}))
    # The recorded request took 0.2 s for 100 prompt tokens and 2 s for 40 output tokens, at one cent per second.
    prompt_usd = 0.2 * 0.01 / 100 * min(num_bytes + TEMPLATE_TOKENS, 1000)  # at most the model's context
    assert available_usd == [0, pytest.approx(0.2 - prompt_usd - 2 * 0.01 / 40)]  # the price of "b" is unknown


def test_expired_key_is_refused_on_every_route(call_gate, settings):
    key, record = new_key("late", expires_at=time.time() + 3600)
    expired_key, expired_record = new_key("gone", expires_at=time.time() - 1)
    fixed_keys_settings = {"key_file": None, "fixed_keys": (record, expired_record)}
    answered, refused, listed = call_gate(
        post(key), post(expired_key), get("/v1/models", expired_key), **fixed_keys_settings
    )
    assert answered.status_code == 200
    assert error_of(refused) == error_of(listed) == (401, "expired_api_key")


@pytest.mark.parametrize(
    "request_with",
    [
        lambda key: {"params": {"api_key": key, "key": key, "access_token": key, "authorization": f"Bearer {key}"}},
        lambda key: {"headers": {"x-api-key": key, "api-key": key, "x-goog-api-key": key}},
        lambda key: {"headers": {"cookie": f"authorization=Bearer {key}; api_key={key}"}},
        lambda key: {"headers": {"authorization": f"Basic {key}"}},
        lambda key: {"headers": {"authorization": key}},
        lambda key: {"headers": {"proxy-authorization": f"Bearer {key}"}},
    ],
)
def test_key_is_only_read_from_the_authorization_header(call_gate, keys, request_with):
    """A key in a URL would be logged, and browsers attach cookies to requests from any page."""
    (answer,) = call_gate((("GET", "/v1/models"), request_with(keys["alice"])))
    assert error_of(answer) == (401, "missing_api_key")


def test_default_max_tokens_are_the_smallest_limit(call_gate, keys, engine):
    """A chat gets a cap instead of max_tokens: after a long prompt, vLLM would refuse max_tokens beyond the context."""
    for key, limit, cap in (("small", None, 100), ("small", 30, 30), ("alice", 30, 30), ("alice", None, None)):
        call_gate(post(keys[key]), max_output_tokens=limit)
        assert engine.context.cap_tokens == cap
        assert "max_tokens" not in engine.forwarded
    call_gate(post(keys["small"], max_tokens=30))
    assert (engine.forwarded["max_tokens"], engine.context.cap_tokens) == (30, None)
    for limit, tokens in ((8, 8), (30, 16), (None, 16)):
        call_gate(post(keys["alice"], path="/v1/completions", prompt="x"), max_output_tokens=limit)
        assert engine.forwarded["max_tokens"] == tokens


COMPLETIONS = "/v1/completions"


def test_echoed_prompt_counts_one_token_per_choice(call_gate, keys, engine):
    echo = {"path": COMPLETIONS, "echo": True, "max_tokens": 0, "logprobs": 1}
    refused, answered, over_budget = call_gate(
        post(keys["small"], **echo, prompt=["x"] * 101),
        post(keys["small"], **echo, prompt=["x"] * 100),
        post(keys["small"], **echo, prompt="x"),
    )
    assert error_of(refused) == (400, "max_tokens_too_large")
    assert answered.status_code == 200
    assert engine.forwarded["max_tokens"] == 0
    assert error_of(over_budget) == (429, "insufficient_quota")
    (refused,) = call_gate(post(keys["alice"], **echo, prompt=["x"] * 9), max_output_tokens=8)
    assert error_of(refused) == (400, "max_tokens_too_large")


@pytest.mark.parametrize(
    ("fields", "limit", "expected"),
    [
        ({"n": 4, "max_tokens": 16}, 64, 200),
        ({"n": 4, "max_tokens": 17}, 64, (400, "max_tokens_too_large")),
        ({"path": COMPLETIONS, "prompt": [[1]] * 5, "max_tokens": 16}, 64, (400, "max_tokens_too_large")),
        ({"path": COMPLETIONS, "prompt": [1] * 500, "max_tokens": 64}, 64, 200),
        ({"n": 65}, 64, (400, "max_tokens_too_large")),
        ({"model": "b", "n": 8}, None, 200),
        ({"model": "b", "n": 9}, None, (400, "too_many_choices")),
        ({"model": "b", "path": COMPLETIONS, "prompt": ["x"] * 8}, None, 200),
        ({"model": "b", "path": COMPLETIONS, "prompt": ["x"] * 9}, None, (400, "too_many_choices")),
        ({"model": "b", "path": COMPLETIONS, "prompt": [[1]] * 3, "n": 3}, None, (400, "too_many_choices")),
    ],
)
def test_limits_include_all_choices(call_gate, keys, fields, limit, expected):
    (answer,) = call_gate(post(keys["alice"], **fields), max_output_tokens=limit)
    assert (200 if answer.status_code == 200 else error_of(answer)) == expected


def test_choices_share_the_default_max_tokens(call_gate, keys, engine):
    call_gate(post(keys["small"], n=4))
    assert engine.context.cap_tokens == 25
    call_gate(post(keys["alice"], n=4), max_output_tokens=30)
    assert engine.context.cap_tokens == 7
    call_gate(post(keys["alice"], path=COMPLETIONS, prompt=["x", "y"], n=2), max_output_tokens=30)
    assert engine.forwarded["max_tokens"] == 7


def events_of(answer):
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "never"),
        ({"stream_options": {"include_usage": True}}, "last"),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "each"),
        ({"stream_options": {"continuous_usage_stats": True}}, "never"),
    ],
)
def test_stream_usage_is_always_requested_from_the_engine(call_gate, keys, options, shown, engine):
    """If the client did not request usage, the replica removes it. The gate does not change the stream."""
    (answer,) = call_gate(post(keys["alice"], stream=True, **options))
    assert engine.forwarded["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert engine.context.shown_usage == shown
    assert answer.content == b"".join(map(encode_event, EVENTS)) + b"data: [DONE]\n\n"


def test_cost_of_streams_counts_against_the_budget(call_gate, keys):
    first, second = call_gate(post(keys["small"], stream=True), post(keys["small"]))
    assert (first.status_code, error_of(second)) == (200, (429, "insufficient_quota"))
    # The first stream fails before its cost is known, so its reservation stays.
    limited = {"max_tokens": 10}
    first, second = call_gate(
        post(keys["small"], stream=True, **limited), post(keys["small"], **limited), app=FakeEngineApp(fails_late=True)
    )
    assert (first.status_code, error_of(second)) == (200, (429, "rate_limit_exceeded"))
    assert "reserved by running requests" in second.json()["error"]["message"]


def test_failed_stream_ends_with_an_error_event(call_gate, keys):
    (answer,) = call_gate(post(keys["alice"], stream=True), app=FakeEngineApp(fails_late=True))
    assert events_of(answer)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


def test_slow_answer_times_out_and_is_cancelled(call_gate, keys):
    cancelled = []

    async def hang(scope, receive, send):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    (answer,) = call_gate(post(keys["alice"]), app=hang, request_timeout_s=0.05)
    assert error_of(answer) == (504, "timeout")
    assert answer.json()["error"]["type"] == "timeout_error"
    assert cancelled == [True]


@pytest.mark.parametrize("client_disconnects", [True, False])
def test_cancelled_request_is_charged_from_the_ledger(settings, keys, engine_account, client_disconnects):
    """The gate gets no answer, so it charges the cost that the ledger records, which exceeds the key's budget."""
    engine_account.ready()

    async def hang(scope, receive, send):
        request = engine_account.begin(
            Context(request_id=dict(scope["headers"])[b"x-request-id"].decode(), key="small")
        )
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            engine_account._monotonic.now += 20  # 20 s x 2 devices x 0.01 USD
            request.write("cut")
            raise

    async def main():
        gate = Gate(hang, GateSettings(**settings, request_timeout_s=60 if client_disconnects else 0.2), ROUTES)
        transport = httpx.ASGITransport(app=gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://peagle") as http:
            arguments, body = post(keys["small"])
            first = asyncio.create_task(http.request(*arguments, **body))
            await asyncio.sleep(0.1)
            if client_disconnects:
                first.cancel()
            await asyncio.wait([first])
            await asyncio.sleep(1)  # the poll interval of the ledger
            return await http.request(*arguments, **body)

    assert error_of(asyncio.run(main())) == (429, "insufficient_quota")


def test_running_requests_are_counted(call_gate, keys):
    load, num_running = Load(), []

    class RecordingEngine(FakeEngineApp):
        async def __call__(self, scope, receive, send):
            num_running.append((load.num_running("a"), load.num_running("b")))
            await super().__call__(scope, receive, send)

    def send(*requests, **engine_options):
        return call_gate(*requests, app=RecordingEngine(**engine_options), load=load)

    send(post(keys["alice"]), post(keys["alice"], model="b"))
    send(post(keys["alice"]), error=RuntimeError("boom"))
    assert num_running == [(1, 0), (0, 1), (1, 0)]
    assert load.num_running("a") == load.num_running("b") == 0


@pytest.fixture
def read_prompt_log(tmp_path):
    """Return a function that reads all records of the prompt log."""

    def read():
        paths = (tmp_path / "state" / "prompts").iterdir()
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    return read


def test_prompts_are_logged_if_enabled(call_gate, keys, tmp_path, read_prompt_log):
    folder, chat = tmp_path / "state" / "prompts", [{"role": "user", "content": "what I ask"}]
    call_gate(post(keys["alice"], messages=chat))
    assert not folder.exists()
    requests = post(keys["alice"], messages=chat, stream=True), post(keys["boss"], path="/v1/completions", prompt="Hé")
    answers = call_gate(*requests, get("/v1/cost", keys["boss"]), post(keys["alice"], model="c"), prompts=folder)
    first, second = read_prompt_log()
    assert first["body"] == {"model": "a", "messages": chat, "stream": True}
    assert (first["key"], first["model"], first["path"]) == ("alice", "a", CHAT)
    assert (second["key"], second["path"], second["body"]["prompt"]) == ("boss", "/v1/completions", "Hé")
    assert [logged["request_id"] for logged in (first, second)] == [
        answer.headers["x-peagle-request-id"] for answer in answers[:2]
    ]
    assert 0 <= time.time() - first["received_at"] < 60
    (path,) = folder.iterdir()
    assert [stat.S_IMODE(private_path.stat().st_mode) for private_path in (folder, path)] == [0o700, 0o600]
    assert keys["alice"] not in path.read_text()


def test_request_is_answered_if_the_prompt_log_fails(call_gate, keys, tmp_path, caplog):
    (tmp_path / "file").touch()
    (answer,) = call_gate(post(keys["alice"]), prompts=tmp_path / "file" / "prompts")
    assert answer.status_code == 200
    assert "to the prompt log" in caplog.text


async def test_timeout_during_prompt_log_leaves_reservation_to_expire(settings, keys, tmp_path, monkeypatch):
    gate = Gate(FakeEngineApp(), GateSettings(**settings, prompts=tmp_path / "prompts", request_timeout_s=0.2), ROUTES)
    monkeypatch.setattr(gate._prompts, "write", lambda **_: asyncio.sleep(60))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://peagle") as http:
        arguments, body = post(keys["alice"])
        answer = await http.request(*arguments, **body)
    waiting = gate._limits._waiting
    assert error_of(answer) == (504, "timeout")
    assert len(waiting) == 1  # the reservation expires after two minutes, since the request never reached an engine


def test_large_body_is_acknowledged(settings, keys):
    """Without acknowledgements, the proxy would wait forever after one window."""
    gate = Gate(FakeEngineApp(), GateSettings(**settings | {"max_body_bytes": 8 << 20}), ROUTES)
    piece = {"type": "http.request", "body": b" " * (1 << 20), "more_body": True, "peagle.expects_acks": True}
    sent = messages_from(gate, *[piece] * 6, {**piece, "body": b"{}", "more_body": False}, key=keys["alice"])
    acks = [message["num_bytes"] for message in sent if message["type"] == "peagle.read"]
    assert acks == [(number + 1) << 20 for number in range(6)]


@pytest.mark.parametrize(("key_name", "is_delayed"), [("alice", True), (None, True), ("without keys", False)])
def test_consecutive_refusals_are_delayed_only_if_keys_are_required(call_gate, keys, key_name, is_delayed):
    requires_key = key_name in ("alice", None)
    requests = [get("/v1/nothing", keys.get(key_name))] * 25
    started_at = time.monotonic()
    answers = call_gate(*requests, requires_key=requires_key, refusals_per_s=8)
    assert {answer.status_code for answer in answers} == {404 if key_name else 401}
    assert (time.monotonic() - started_at >= 0.3) == is_delayed


def make_scope(attributes=None, path="/invocations", **values):
    headers = [(b"x-amzn-sagemaker-custom-attributes", attributes.encode())] if attributes else []
    return {"type": "http", "method": "POST", "path": path, "headers": headers, **values}


def test_request_without_route_and_key_attributes_is_unchanged():
    for scope in (make_scope(), make_scope("c000b4f9-df62-4c85-a0bf-7c525f9104a4"), make_scope("x=1")):
        assert to_api_request(scope) == scope


def test_key_attribute_replaces_the_authorization_header():
    scope = make_scope("key=pk-1")
    scope["headers"].append((b"authorization", b"AWS4-HMAC-SHA256 Credential=..."))
    assert header(to_api_request(scope), "authorization") == "Bearer pk-1"
    assert to_api_request(scope)["path"] == "/invocations"


def test_other_routes_are_unchanged():
    for path in ("/v1/cost", "/invocations/", "/x/invocations", "/ping"):
        scope = make_scope("route=/v1/models,key=pk-1", path=path)
        assert to_api_request(scope) is scope


def test_root_path_is_kept():
    scope = to_api_request(make_scope("route=/v1/models", path="/under/invocations", root_path="/under"))
    assert scope["path"] == "/under/v1/models"
