"""Every route of the endpoint, fuzzed from its own OpenAPI schema; and what no schema says: slow, huge, broken.

The real gate, routes, batches and ledger in this process behind a real HTTP server; the fake engine answers, without
Ray Serve between. In `make soak` what a schema says is also asked of `peagle serve` with vLLM. The cases are the same
in each run.
"""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from peagle import hardware
from peagle.economics.prices import Price
from peagle.hardware import Hardware
from pipelines.batch.placing import Neighbours, Placement
from pipelines.online import ingress as module
from pipelines.online.account import Engine, EngineAccount
from pipelines.online.batches.settings import BatchSettings, Recipe
from pipelines.online.gate import GateSettings
from pipelines.online.relay import relay
from pipelines.online.requests import CHAT, COMPLETIONS, FILES, ServedModel
from pipelines.online.stand_in import StandIn, StandInEngine
from tests.faults.endpoint import serving

MODEL = ServedModel(name="m", max_model_len=256)
CARD = {"id": "m", "object": "model", "peagle": {"max_replicas": 1, "max_requests_per_replica": 8}}
DELIBERATE = (503, 504)
NUM_CASES = {"positive": 25, "negative": 25}  # of each route


class Handle:
    """A deployment's handle as the ingress uses it, with the engine right behind it."""

    deployment_name = "m"

    def __init__(self, engine, account):
        self._engine, self._account = engine, account

    def options(self, **_):
        return self

    @property
    def chat(self):
        return _Method(self._engine.chat, self._account)

    @property
    def completions(self):
        return _Method(self._engine.completions, self._account)


class _Method:
    def __init__(self, answer, account):
        self._answer, self._account = answer, account

    async def remote(self, request, info):
        def begin():
            return self._account.begin(info.headers["x-request-id"], "local")

        async for part in relay(_in_lists(self._answer(request)), begin, wants_each_usage=False):
            yield part


async def _in_lists(parts):
    """As Ray's batching of streams."""
    async for part in parts:
        yield [part] if isinstance(part, str) else part


class Config:
    model_id = "m"
    engine_kwargs = {"max_model_len": MODEL.max_model_len}  # noqa: RUF012


class NoRunner:
    """Batches wait for ever."""

    def check(self, path, rules):
        return self

    def poll(self):
        return None

    def kill(self):
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endpoint")
    price = Price.fixed(usd_per_hour=1, device="vcpu", num_devices=2)
    engine = Engine(model="m", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=price.usd_per_device_s)
    account = EngineAccount(folder / "ledger", engine, heartbeat_s=300)
    settings = GateSettings(
        models=(MODEL,), ledger=folder / "ledger", requires_key=False, max_body_bytes=64 * 1024, body_timeout_s=1,
        max_upload_bytes=64 * 1024,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RayRunner", NoRunner)
        patch.setattr(module, "replica_counts", lambda _: {"m": dict.fromkeys(_STATES, 1)})
        stand_in = StandInEngine(StandIn(), Config())
        ingress = module.PeagleIngress(
            {"m": Handle(stand_in, account)}, {"m": CARD}, settings=settings, price=price, batches=_batches(folder)
        )
        app = module.make_app(settings)
        for name, route in module._ROUTES.items():
            route(app)(getattr(ingress, name))
        app.router.add_event_handler("startup", stand_in.start)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join()
        ingress.batches.close()
        account.end()


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory, embedded_target):
    """`peagle serve` with a vLLM engine behind Ray Serve, whose model is called as the stand-in's."""
    folder = tmp_path_factory.mktemp("vllm")
    config = folder / "serve.yaml"
    config.write_text("models: [{model: smollm2-135m, name: m, max_model_len: 256}]")
    flags = [
        "--config", str(config), "--max-num-seqs", "4", "--enforce-eager", "--max-output-tokens", "4", "--max-body-kib",
        "64", "--max-choices", "4", "--usd-per-hour", "1", "--batches", str(folder / "batches"),
    ]  # fmt: skip
    with serving(folder, flags, start_s=240) as endpoint:
        yield endpoint.url


@pytest.fixture(params=["url", pytest.param("vllm_url", marks=pytest.mark.soak)])
def served(request):
    """The address of an endpoint that answers, by either engine."""
    return request.getfixturevalue(request.param)


_STATES = ("num_running_replicas", "num_starting_replicas", "num_stopping_replicas")


def _batches(folder):
    placement = Placement(num_cpus=1, num_gpus=0, num_devices=1, device="vcpu", num_engines_on_node=1)
    here: Hardware = hardware.detect()
    recipe = Recipe(model=MODEL, config={}, neighbours=Neighbours(places="test", hardware=here, placement=placement))
    return BatchSettings(
        folder=str(folder / "batches"), recipes={"m": recipe}, at_once=1, max_output_tokens=None,
        ledger=folder / "ledger",
    )  # fmt: skip


FORM = "content-type: multipart/form-data; boundary=b"


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def wrong_with(response):
    """A fault of ours, or an error that is not in OpenAI's format; None where nothing is wrong."""
    status = response.status_code
    if status >= 500 and status not in DELIBERATE:
        return f"{status} {response.content[:300]!r}"
    if status >= 400:
        try:
            error = json.loads(response.content)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert isinstance(error["message"], str)
            assert isinstance(error["type"], str)
        except (ValueError, KeyError, TypeError, AssertionError):
            return f"{status} is not in the format: {response.content[:300]!r}"
    return None


def test_the_schema_says_what_each_route_takes(url):
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    takes = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert takes == {CHAT, COMPLETIONS, FILES, "/v1/batches"}


# Hypothesis blames a strategy when the state of `random` changes while it draws; threads of this process change it.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", NUM_CASES)
def test_no_case_of_the_schema_is_a_fault(served, mode):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable

    schema = schemathesis.openapi.from_url(f"{served}/openapi.json")
    routes = [result.ok() for result in schema.get_all_operations()]
    assert {(route.method.upper(), route.path) for route in routes} >= {("POST", CHAT), ("POST", FILES)}
    wrong = []
    for route in routes:

        @settings(
            derandomize=True, max_examples=NUM_CASES[mode], deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        )  # fmt: skip
        @given(case=route.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def ask(case):
            if what := wrong_with(case.call(base_url=served, timeout=30)):
                wrong.append(f"{case.method} {case.path} {case.body!r:.200}: {what}")

        with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with a route that takes nothing
            ask()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/batches"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"model": "m"', b"\xff\xfe", b"[" * 20_000, b'{"a": ' * 5_000, b'"\\ud800"', b"NaN",
     b'{"max_tokens": 1e999}', b'{"max_tokens": ' + b"9" * 5_000 + b"}",
     b'{"messages": "\\ud800", "prompt": "\\ud800"}'],
)  # fmt: skip
def test_what_is_no_request_is_refused(url, path, content):
    response = httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=30)
    assert wrong_with(response) is None
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
def test_a_field_that_vllm_trips_over_is_the_clients_fault(served, changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **changes}
    response = httpx.post(served + CHAT, content=json.dumps(body), timeout=30)
    assert wrong_with(response) is None


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_json_is_taken_whatever_it_is_called(url, kind):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    headers = {"content-type": kind} if kind else {}
    response = httpx.post(url + CHAT, content=json.dumps(body), headers=headers, timeout=30)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("window_s", ["inf", "-inf", "nan", "1e999", "1e308", "5e-324", "0", "-1", "x", ""])
@pytest.mark.parametrize("path", ["/v1/cost", "/v1/live"])
def test_a_window_of_any_length_is_answered_or_refused(url, path, window_s):
    response = httpx.get(url + path, params={"window_s": window_s}, timeout=30)
    assert wrong_with(response) is None


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/batches", FILES])
def test_a_body_without_end_is_refused_and_not_read_on(url, path, has_length):
    length = "content-length: 999999999999" if has_length else "transfer-encoding: chunked"
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with connect(url) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{FORM}\r\n{length}\r\n\r\n".encode())
        with pytest.raises((ConnectionError, TimeoutError)):
            client.sendall(chunk * 1000)  # 64 MiB
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize("path", [CHAT, FILES])
def test_a_body_that_says_that_it_is_too_large_is_refused_at_once(url, path):
    with connect(url) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{FORM}\r\ncontent-length: 999999999999\r\n\r\n"
        client.sendall(head.encode())
        answer = client.recv(65_536)
    assert b" 413 " in answer.splitlines()[0]
    assert b"body_too_large" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("path", [CHAT, FILES])
def test_a_client_that_sends_byte_by_byte_is_given_up_on(url, path):
    with connect(url) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{FORM}\r\ncontent-length: 1000\r\n\r\n".encode())
        client.settimeout(0.4)
        answer, started = b"", time.monotonic()
        while not answer and time.monotonic() - started < 15:
            with contextlib.suppress(TimeoutError):
                answer = client.recv(65_536)
            if path != FILES and not answer:
                client.sendall(b"x")  # an upload has a time for each piece, a body for all of it
    assert b" 408 " in answer.splitlines()[0]
    assert b"request_timeout" in answer
    assert time.monotonic() - started < 10
