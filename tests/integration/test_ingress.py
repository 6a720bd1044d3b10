"""The ingress on real Ray Serve, with an engine that answers once the test creates a file."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest
from ray import serve

from peagle.economics.prices import Price
from peagle.ports import free_port
from peagle.requests.fields import CHAT_URL
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import GateSettings
from pipelines.online.ingress import make_ingress

TIMEOUT_S = 6.0  # of a request: long enough to observe three waiting requests
BODY = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
CARD = {"id": "m", "object": "model", "peagle": {"max_replicas": 3, "max_requests_per_replica": 1}}


@serve.deployment(max_ongoing_requests=1)
class WaitingEngine:
    """Answers once the file at `path` exists. A stream sends its first event immediately.

    A cancelled request creates a file next to `path`.
    """

    def __init__(self, path):
        self._path = Path(path)

    async def chat(self, request, raw_request_info=None):
        try:
            if request.stream:
                yield ['data: {"choices": [{"delta": {}}]}\n\n']
            while not self._path.exists():
                await asyncio.sleep(0.05)
            yield ['data: {"choices": []}\n\n', "data: [DONE]\n\n"]
        except asyncio.CancelledError:
            self._path.with_name(f"cancelled-{raw_request_info.headers['x-request-id']}").touch()
            raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder for `go`, the file that the engines wait for, and for the files of cancelled requests."""
    return tmp_path_factory.mktemp("ingress")


@pytest.fixture(scope="module")
def url(ray_cluster, folder):
    port = free_port()
    (folder / "ledger").mkdir()
    settings = GateSettings(
        models=(ServedModel(name="m", max_model_len=100),),
        ledger=folder / "ledger",
        requires_key=False,
        request_timeout_s=TIMEOUT_S,
    )
    ingress = serve.deployment(make_ingress(settings)).bind(
        llm_deployments={"m": WaitingEngine.bind(str(folder / "go"))},
        model_cards={"m": CARD},
        settings=settings,
        price=Price.fixed(usd_per_hour=1, device="vcpu", num_devices=2),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(ingress, name="peagle")
    url = f"http://127.0.0.1:{port}"
    (folder / "go").touch()
    while httpx.post(url + CHAT_URL, json=BODY | {"stream": True}, timeout=60).status_code != 200:
        pass  # until the handle works: its first call takes seconds
    (folder / "go").unlink()
    yield url
    serve.shutdown()


def test_page_models_and_live_load_are_served(url, folder):
    with httpx.Client(base_url=url, timeout=60) as http:
        page = http.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert http.get("/page/app.js").headers["content-type"].startswith("text/javascript")
        assert http.get("/page/nothing.js").status_code == http.get("/page/..%2fgate.py").status_code == 404
        assert http.get("/health").json() == {"status": "ok", "requires_key": False}
        assert http.get("/v1/models").json()["data"] == [CARD]
        for window in (0, 61, 960, "x"):
            answer = http.get("/v1/live", params={"window_s": window})
            assert answer.status_code == (422 if window == "x" else 400)
        senders = [threading.Thread(target=send_stream, args=(url,)) for _ in range(3)]
        for sender in senders:
            sender.start()
        assert wait_for_load(http, num_requests_under_way=3) == {
            "num_running_replicas": 1,
            "num_starting_replicas": 0,
            "num_stopping_replicas": 0,
            "max_replicas": 3,
            "num_requests_under_way": 3,
            "num_requests_waiting": 2,
        }
        (folder / "go").touch()
        for sender in senders:
            sender.join()
        assert wait_for_load(http, num_requests_under_way=0)["num_requests_waiting"] == 0


def test_timed_out_request_is_cancelled_in_its_engine(url, folder):
    (folder / "go").unlink(missing_ok=True)
    with httpx.Client(base_url=url, timeout=60) as http:
        for is_stream in (True, False, True):  # each request needs the engine's only slot
            answer = http.post(CHAT_URL, json=BODY | {"stream": is_stream})
            assert answer.status_code == (200 if is_stream else 504)
            assert f"took longer than {TIMEOUT_S:g} s" in answer.text
            cancelled_file = folder / f"cancelled-{answer.headers['x-peagle-request-id']}"
            deadline = time.monotonic() + 10
            while not cancelled_file.exists():
                assert time.monotonic() < deadline, "the request is still in the engine"
                time.sleep(0.05)


def send_stream(url):
    httpx.post(url + CHAT_URL, json=BODY | {"stream": True}, timeout=60).raise_for_status()


def wait_for_load(http, *, num_requests_under_way):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        load = http.get("/v1/live").raise_for_status().json()["load"]["m"]
        if load["num_requests_under_way"] == num_requests_under_way:
            return load
        time.sleep(0.1)
    raise AssertionError(load)
