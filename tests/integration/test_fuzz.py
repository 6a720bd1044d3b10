"""Every route is fuzzed with cases from the OpenAPI schema, and gets slow, huge and invalid requests.

The endpoint runs in this process (`tests/in_process.py`). It has a key without limits, and a key that may not use any
engine. `make soak` also sends the schema's cases to `peagle serve` with vLLM. The cases are the same in each run.
"""

import contextlib
import json
import socket
import time

import httpx
import pytest

from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL
from pipelines.online.gateway.keys import new_key, write_keys
from pipelines.online.wire import FILES_URL
from tests.faults.endpoint import serving
from tests.in_process import Served, serve_in_process

ALLOWED_5XX = (503, 504)
NUM_CASES = {"positive": 25, "negative": 25}  # per route
# mallory cannot reach an engine, because the only model that her key allows does not exist.
KEYS = {
    "alice": {},
    "mallory": {"models": ["another"], "requests_per_min": 10_000, "output_tokens_per_min": 1, "budget_usd": 1e-9},
}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endpoint")
    with serve_in_process(
        folder, KEYS, max_body_bytes=64 * 1024, body_timeout_s=1, max_upload_bytes=64 * 1024
    ) as served:
        yield served


@pytest.fixture(scope="module")
def vllm_endpoint(tmp_path_factory, embedded_target):
    """`peagle serve` with a vLLM engine behind Ray Serve. The model has the same name as the fake model."""
    folder = tmp_path_factory.mktemp("vllm")
    config = folder / "serve.yaml"
    config.write_text("models: [{model: smollm2-135m, name: m, max_model_len: 256}]")
    secrets = {name: new_key(name, **limits) for name, limits in KEYS.items()}
    write_keys(folder / "keys.json", [record for _, record in secrets.values()])
    flags = [
        "--config", str(config), "--max-num-seqs", "4", "--enforce-eager", "--max-output-tokens", "4", "--max-body-kib",
        "64", "--max-choices", "4", "--usd-per-hour", "1", "--batches", str(folder / "batches"), "--keys",
        str(folder / "keys.json"),
    ]  # fmt: skip
    with serving(folder, flags, start_s=240) as endpoint:
        yield Served(endpoint.url, {name: key for name, (key, _) in secrets.items()}, folder / "state" / "ledger")


@pytest.fixture(params=["endpoint", pytest.param("vllm_endpoint", marks=pytest.mark.soak)])
def served(request):
    """An endpoint with the fake engine; in soak tests, also one with vLLM."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def http(endpoint):
    """An HTTP client with the key without limits."""
    with endpoint.client("alice") as client:
        yield client


FORM = "content-type: multipart/form-data; boundary=b"


def encode_head(endpoint, path, *headers):
    key = f"authorization: Bearer {endpoint.keys['alice']}"
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", key, FORM, *headers, "", ""]).encode()


def connect(endpoint):
    host, port = endpoint.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def problem_with(response):
    """Return None if the response is allowed, else the problem: a server error, or an error not in OpenAI's format."""
    status = response.status_code
    if status >= 500 and status not in ALLOWED_5XX:
        return f"{status} {response.content[:300]!r}"
    if status >= 400:
        try:
            error = json.loads(response.content)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert isinstance(error["message"], str)
            assert isinstance(error["type"], str)
        except (ValueError, KeyError, TypeError, AssertionError):
            return f"{status} is not in OpenAI's error format: {response.content[:300]!r}"
    return None


def test_schema_describes_request_bodies(http):
    paths = http.get("/openapi.json").json()["paths"]
    paths_with_body = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert paths_with_body == {CHAT_URL, COMPLETIONS_URL, FILES_URL, "/v1/batches"}


# Hypothesis warns if the state of `random` changes while a strategy draws. Here, other threads change it.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", NUM_CASES)
def test_schema_cases_cause_no_server_error(served, mode):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable

    alice_headers, mallory_headers = ({"authorization": f"Bearer {served.keys[name]}"} for name in ("alice", "mallory"))
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", headers=alice_headers)
    routes = [result.ok() for result in schema.get_all_operations()]
    assert {(route.method.upper(), route.path) for route in routes} >= {("POST", CHAT_URL), ("POST", FILES_URL)}
    problems = []
    for route in routes:

        @settings(
            derandomize=True, max_examples=NUM_CASES[mode], deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        )  # fmt: skip
        @given(case=route.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def send(case):
            for headers in (alice_headers, mallory_headers):
                if problem := problem_with(case.call(base_url=served.url, headers=headers, timeout=30)):
                    problems.append(f"{case.method} {case.path} {case.body!r:.200}: {problem}")

        with contextlib.suppress(Unsatisfiable):  # routes without input have no negative cases
            send()
    assert not problems, "\n".join(problems)
    assert {request.key for request in served.answered()} <= {"alice"}


@pytest.mark.parametrize("path", [CHAT_URL, COMPLETIONS_URL, "/v1/batches"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"model": "m"', b"\xff\xfe", b"[" * 20_000, b'{"a": ' * 5_000, b'"\\ud800"', b"NaN",
     b'{"max_tokens": 1e999}', b'{"max_tokens": ' + b"9" * 5_000 + b"}",
     b'{"messages": "\\ud800", "prompt": "\\ud800"}'],
)  # fmt: skip
def test_invalid_bodies_are_refused(http, path, content):
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert problem_with(response) is None
    assert 400 <= response.status_code < 500


@pytest.mark.parametrize(
    "changes",
    [
        {"structured_outputs": []},
        {"tools": "x"},
        {"response_format": 1},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "a\x00b"}], "max_tokens": 1},
        {"messages": []},
        {"stop": ["x"] * 500},
        {"logit_bias": {"x": 1}},
        {"top_k": 10**21},
        {"stream_options": {"include_usage": "x"}},
    ],
)
def test_fields_that_crash_vllms_validators_cause_no_server_error(served, changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **changes}
    with served.client("alice") as http:
        response = http.post(CHAT_URL, content=json.dumps(body))
    assert problem_with(response) is None


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("path", [CHAT_URL, COMPLETIONS_URL, "/v1/batches", FILES_URL])
def test_endless_body_is_refused(endpoint, path, has_length):
    length = "content-length: 999999999999" if has_length else "transfer-encoding: chunked"
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with connect(endpoint) as client:
        client.sendall(encode_head(endpoint, path, length))
        with pytest.raises((ConnectionError, TimeoutError)):
            client.sendall(chunk * 1000)  # 64 MiB
    assert httpx.get(endpoint.url + "/health").status_code == 200


@pytest.mark.parametrize("path", [CHAT_URL, FILES_URL])
def test_too_large_content_length_is_refused(endpoint, path):
    with connect(endpoint) as client:
        client.sendall(encode_head(endpoint, path, "content-length: 999999999999"))
        answer = client.recv(65_536)
    assert b" 413 " in answer.splitlines()[0]
    assert b"body_too_large" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("path", [CHAT_URL, FILES_URL])
def test_slow_sender_gets_408(endpoint, path):
    with connect(endpoint) as client:
        client.sendall(encode_head(endpoint, path, "content-length: 1000"))
        client.settimeout(0.4)
        answer, started_at = b"", time.monotonic()
        while not answer and time.monotonic() - started_at < 15:
            with contextlib.suppress(TimeoutError):
                answer = client.recv(65_536)
            if path != FILES_URL and not answer:
                client.sendall(b"x")  # an upload has a timeout per piece, other bodies have a total timeout
    assert b" 408 " in answer.splitlines()[0]
    assert b"request_timeout" in answer
    assert time.monotonic() - started_at < 10
