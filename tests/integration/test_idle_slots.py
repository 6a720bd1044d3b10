"""A batch runs in idle slots of `peagle serve` with the fake engine, despite interactive requests and a crash."""

import asyncio
import json
import os
import signal
import time

import httpx
import openai
import pytest

from peagle.economics.ledger import RequestReader
from peagle.runs.audit import audit_files
from peagle.runs.directory import RunDirectory
from tests.faults.clients import Clients
from tests.faults.endpoint import Size, serving

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
NUM_ROWS, ROW_TOKENS = 80, 40
WAIT_S = 300
SIZE_AND_LOAD = Size(min_replicas=1, max_replicas=2, token_s=0.05, tokens=10)


def batch_lines():
    for number in range(NUM_ROWS):
        messages = [{"role": "user", "content": f"say {number}"}]
        body = {"model": "fake", "messages": messages, "max_tokens": ROW_TOKENS, "ignore_eos": True}
        yield json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def create_batch(client):
    uploaded = client.files.create(file=("rows.jsonl", "\n".join(batch_lines()).encode()), purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")


def wait(client, batch, condition):
    deadline = time.monotonic() + WAIT_S
    while not condition(result := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, result
        time.sleep(0.2)
    return result


async def run_clients_during_batch(endpoint, client, batch):
    """Send interactive requests during the batch, kill the engine once, and return the outcomes of the requests."""
    clients = Clients(endpoint.url, 3, SIZE_AND_LOAD.tokens)
    await asyncio.sleep(5)
    (core,) = endpoint.pids("the engine's process")
    os.kill(core, signal.SIGKILL)
    await asyncio.to_thread(wait, client, batch, lambda result: result.status != "in_progress")
    await clients.stop()
    return clients.tally.outcomes()


def test_batch_in_idle_slots_is_complete_and_charged_once(tmp_path):
    flags = [*SIZE_AND_LOAD.flags(), "--batches", str(tmp_path / "batches"), "--batch-engines", "endpoint"]
    with serving(tmp_path, flags, start_s=420) as endpoint:
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
            batch = create_batch(client)
            wait(client, batch, lambda result: result.request_counts.completed > 0)
            assert endpoint.load()["num_running_replicas"] == 1, "rows of a batch must not start engines"
            outcomes = asyncio.run(run_clients_during_batch(endpoint, client, batch))
            finished = wait(client, batch, lambda result: result.status in ("completed", "failed"))
            answers = [json.loads(line) for line in client.files.content(finished.output_file_id).text.splitlines()]
        cost = httpx.get(f"{endpoint.url}/v1/cost", timeout=60).raise_for_status().json()
    assert (finished.status, finished.request_counts.completed, finished.request_counts.failed) == (
        "completed",
        NUM_ROWS,
        0,
    )
    assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(NUM_ROWS)]
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {ROW_TOKENS}
    assert finished.usage.output_tokens == NUM_ROWS * ROW_TOKENS
    assert outcomes["answered"] > 0
    assert outcomes["other"] == 0
    run = RunDirectory(tmp_path / "batches" / "runs" / batch.id)
    assert audit_files(run, run.manifest()).findings == []
    check_charged_once(cost, RequestReader(endpoint.state / "ledger").new(), batch)


def check_charged_once(cost, records, batch):
    (batch_record,) = [record for record in records if record.is_batch]
    rows = [record for record in records if record.request_id.startswith(batch.id) and not record.is_batch]
    assert (batch_record.request_id, batch_record.usd, batch_record.usage.num_output_tokens) == (batch.id, 0.0, 0)
    num_generated = sum(record.usage.num_output_tokens for record in rows)
    assert num_generated >= NUM_ROWS * ROW_TOKENS
    assert cost["total"]["usd"] == pytest.approx(sum(record.usd for record in records))
    assert cost["total"]["usd"] <= cost["account"]["usd"]["total"]
