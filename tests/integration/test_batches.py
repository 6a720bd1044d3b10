"""`/v1/files` and `/v1/batches` with OpenAI's client, on a real Ray cluster with the fake engine."""

import json
import os
import threading
import time

import openai
import pytest
import uvicorn
from openai.types.chat import ChatCompletion

from peagle import hardware
from peagle.economics.ledger import RequestReader
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import read_lease
from pipelines.cluster.placement import Neighbours, Placement
from pipelines.online.batches.routes import ROUTES, Batches, BatchRoutes
from pipelines.online.batches.settings import BatchModel, BatchSettings
from pipelines.online.batches.work import Runner
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import Gate, GateSettings
from pipelines.online.gateway.keys import new_key, write_keys
from pipelines.online.gateway.routes import guarded_app
from pipelines.online.ingress import install_error_handlers
from tests.chaos.processes import command_line, descendants

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]
HARDWARE = hardware.detect()
MODEL = ServedModel(name="m", max_model_len=8192)
WAIT_S = 120


class Endpoint:
    """A server with the batch routes behind the gate, in this process."""

    def __init__(self, folder, key_file):
        placement = Placement(num_cpus=1, num_gpus=0, num_devices=1, device="vcpu", num_engines_on_node=2)
        config = {"engine": "fake", "fake": {"token_s": 0.03}, "max_num_seqs": 2, "usd_per_hour": 1, "heartbeat_s": 0.5}
        batch_model = BatchModel(
            model=MODEL, config=config, neighbours=Neighbours(slot_group="test", hardware=HARDWARE, placement=placement)
        )
        self.settings = BatchSettings(
            folder=str(folder / "batches"), models={"m": batch_model}, max_concurrent=1, max_output_tokens=None,
            ledger=folder / "ledger",
        )  # fmt: skip
        routes = BatchRoutes()
        self.batches = routes.batches = Batches(self.settings, Runner(), spent_usd=lambda key: 0.0)
        app = guarded_app()
        install_error_handlers(app)
        gate = GateSettings(models=(MODEL,), ledger=self.settings.ledger, key_file=key_file, body_timeout_s=60)
        app.add_middleware(Gate, settings=gate, routes=tuple(ROUTES.values()))
        for name, route in ROUTES.items():
            route(app)(getattr(routes, name))
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/v1"

    def close(self):
        self.batches.close()
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def keys(tmp_path):
    secrets = {name: new_key(name) for name in ("alice", "bob")}
    write_keys(tmp_path / "keys.json", [record for _, record in secrets.values()])
    return {name: key for name, (key, _) in secrets.items()}


@pytest.fixture
def start_endpoint(tmp_path, keys):
    """Return a function that starts an endpoint, which is closed after the test."""
    endpoints = []

    def start():
        endpoints.append(Endpoint(tmp_path, tmp_path / "keys.json"))
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        endpoint.close()


def request(number, **changes):
    body = {"model": "m", "messages": [{"role": "user", "content": f"say {number}"}], **changes}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def create_batch(client, requests):
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    uploaded = client.files.create(file=("requests.jsonl", lines.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"suite": "test"}
    )


def wait_until(client, batch, condition):
    deadline = time.monotonic() + WAIT_S
    while not condition(result := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, result
        time.sleep(0.1)
    return result


def lines_of(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_batch_continues_after_a_restart_and_can_be_cancelled(start_endpoint, keys, tmp_path):
    first = start_endpoint()
    with openai.OpenAI(base_url=first.url, api_key=keys["alice"], max_retries=0) as client:
        invalid_request = request(40, prompt_logprobs=1)
        batch = create_batch(client, [*(request(n) for n in range(40)), invalid_request])
        assert (batch.status, batch.metadata) == ("validating", {"suite": "test"})
        wait_until(client, batch, lambda result: result.request_counts.completed > 0)
    first.close()

    second = start_endpoint()
    with openai.OpenAI(base_url=second.url, api_key=keys["alice"], max_retries=0) as client:
        check_completed(client, batch, RunDirectory(second.batches.store.run_path(batch.id)))
        cancelled = check_cancelled(client)
        assert [listed.id for listed in client.batches.list()] == [cancelled.id, batch.id]
        check_prompts_are_deleted(client, (batch, cancelled), tmp_path)
    with openai.OpenAI(base_url=second.url, api_key=keys["bob"], max_retries=0) as stranger:
        check_batch_is_hidden(stranger, batch)
    charges = RequestReader(tmp_path / "ledger").new()
    assert {charge.request_id: charge.outcome for charge in charges} == {batch.id: "ok", cancelled.id: "cut"}
    assert all(charge.key == "alice" and charge.model == "m" and charge.usd > 0 for charge in charges)


def test_validations_share_one_process(start_endpoint, keys):
    earlier_actors, actors = batch_actors(), set()
    with openai.OpenAI(base_url=start_endpoint().url, api_key=keys["alice"], max_retries=0) as client:
        for number in range(4):
            batch = create_batch(client, [request(number, model="unknown")])
            wait_until(client, batch, lambda result: result.status == "failed")
            actors |= batch_actors()
    assert len(actors - earlier_actors) == 1


def batch_actors():
    return {pid for pid in descendants(os.getpid()) if "BatchActor" in command_line(pid)}


def check_completed(client, batch, run):
    completed = wait_until(client, batch, lambda result: result.status == "completed")
    counts = completed.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    assert completed.created_at <= completed.in_progress_at <= completed.finalizing_at <= completed.completed_at
    assert read_lease(run.root).number == 2  # the second endpoint continued the run
    answers = lines_of(client, completed.output_file_id)
    assert [line["custom_id"] for line in answers] == [f"r{n}" for n in range(40)]
    bodies = [ChatCompletion.model_validate(line["response"]["body"]) for line in answers]
    assert all(body.choices[0].message.content for body in bodies)
    assert {body.model for body in bodies} == {"m"}
    assert completed.usage.output_tokens == sum(body.usage.completion_tokens for body in bodies)
    (error,) = lines_of(client, completed.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("r40", 400)
    output_ids = {file.id for file in client.files.list(purpose="batch_output")}
    assert output_ids == {completed.output_file_id, completed.error_file_id}
    client.files.delete(completed.output_file_id)
    assert not list(run.data.iterdir())
    with pytest.raises(openai.NotFoundError):
        client.files.content(completed.output_file_id)


def check_prompts_are_deleted(client, batches, folder):
    """Delete the inputs, and check that no prompt is left in runs or logs."""
    for batch in batches:
        client.files.delete(batch.input_file_id)
        run = RunDirectory(folder / "batches" / "runs" / batch.id)
        assert run.exists
        assert not [*run.data.iterdir(), *run.failed.iterdir()]
    files_with_prompts = [path for path in folder.rglob("*") if path.is_file() and b"say 17" in path.read_bytes()]
    assert files_with_prompts == []


def check_cancelled(client):
    batch = create_batch(client, (request(n) for n in range(400)))
    wait_until(client, batch, lambda result: result.request_counts.completed > 0)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = wait_until(client, batch, lambda result: result.status != "cancelling")
    assert ended.status == "cancelled"
    answers, errors = lines_of(client, ended.output_file_id), lines_of(client, ended.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    ids = [line["custom_id"] for line in answers + errors]
    assert sorted(ids) == sorted(f"r{n}" for n in range(400))
    assert (ended.request_counts.completed, ended.request_counts.failed) == (len(answers), len(errors))
    with pytest.raises(openai.BadRequestError, match="it is cancelled"):
        client.batches.cancel(batch.id)
    return ended


def check_batch_is_hidden(stranger, batch):
    assert not stranger.batches.list().data
    assert not stranger.files.list().data
    for call in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(batch.input_file_id)
    with pytest.raises(openai.BadRequestError):
        stranger.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
