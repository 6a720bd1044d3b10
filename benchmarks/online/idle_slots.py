"""The latency of interactive requests: without a batch, with a batch in idle slots, and with a batch on its own engine.

    python -m benchmarks.online.idle_slots --folder /tmp/idle-slots --output benchmarks/online/RESULT.json
    python -m benchmarks.online.idle_slots --engine vllm ...   with a real engine

Each of the three ways gets its own endpoint, one after the other. Interactive requests start at random times, which are
the same for all ways, whether or not earlier requests have ended. The batch is created first, with more requests than
can finish. Interactive requests start when its first unit is committed, and continue for --seconds and until the next
commit. The batch's throughput is measured between the two commits. Latencies of the fake engine say nothing about
models, since its steps do not take longer with more rows.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.faults.clients import SentRequest, send_request
from tests.faults.endpoint import Endpoint, serving
from tests.origin import origin

_WAYS: dict[str, list[str] | None] = {
    "without a batch": None,
    "in idle slots": ["--batch-engines", "endpoint"],
    "with an engine of its own": ["--batch-engines", "1"],
}
_URL = "/v1/chat/completions"
_POLL_S = 0.5


def main() -> None:
    """Measure each way, write OUTPUT and print the summary."""
    options = _options()
    results = {name: _measure(options, name, flags) for name, flags in _WAYS.items() if name in options.ways}
    record = {
        **origin("python -m benchmarks.online.idle_slots"),
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "results": results,
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: result["summary"] for name, result in results.items()}, indent=2))  # noqa: T201


def _measure(options: argparse.Namespace, name: str, flags: list[str] | None) -> dict[str, Any]:
    folder = options.folder / name.replace(" ", "-")
    batch_flags = [] if flags is None else ["--batches", str(folder / "batches"), *flags]
    with serving(folder, [*_flags(options), *batch_flags], start_s=options.start_s) as endpoint:
        return asyncio.run(_run(options, endpoint, has_batch=flags is not None))


async def _run(options: argparse.Namespace, endpoint: Endpoint, *, has_batch: bool) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=options.start_s) as http:
        await send_request(http, "warm up", options.tokens, is_stream=True, model=options.name)
        batch = await _create_batch(options, http) if has_batch else None
        num_before = await _next_commit(options, http, batch, 0) if batch else 0
        started_at = time.monotonic()
        requests: list[asyncio.Task[SentRequest]] = []
        sender = asyncio.create_task(_send_requests(options, http, requests))
        await asyncio.sleep(options.seconds)
        num_rows = await _next_commit(options, http, batch, await _num_done(http, batch)) - num_before if batch else 0
        seconds = time.monotonic() - started_at
        sender.cancel()
        answers = await asyncio.gather(*requests)
    latencies = [result.latency_s for result in answers if result.outcome == "answered"]
    summary = {
        "num_requests": len(answers),
        "num_answered": len(latencies),
        "latency_p50_s": float(np.percentile(latencies, 50)),
        "latency_p95_s": float(np.percentile(latencies, 95)),
        "batch_requests_per_s": num_rows / seconds,
    }
    return {"summary": summary, "latencies_s": latencies, "outcomes": [result.outcome for result in answers]}


async def _send_requests(
    options: argparse.Namespace, http: httpx.AsyncClient, requests: list[asyncio.Task[SentRequest]]
) -> None:
    generator = random.Random(0)
    while True:
        text = f"Tell me about the number {len(requests)}."
        requests.append(
            asyncio.create_task(send_request(http, text, options.tokens, is_stream=True, model=options.name))
        )
        await asyncio.sleep(generator.expovariate(options.per_s))


async def _create_batch(options: argparse.Namespace, http: httpx.AsyncClient) -> str:
    lines = [json.dumps(_row(options, number)) for number in range(options.rows)]
    files = {"file": ("rows.jsonl", "\n".join(lines).encode())}
    uploaded = (await http.post("/v1/files", data={"purpose": "batch"}, files=files)).raise_for_status().json()
    batch_request = {"input_file_id": uploaded["id"], "endpoint": _URL, "completion_window": "24h"}
    batch_id: str = (await http.post("/v1/batches", json=batch_request)).raise_for_status().json()["id"]
    return batch_id


def _row(options: argparse.Namespace, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Write a story about the number {number}."}]
    body = {"model": options.name, "messages": messages, "max_tokens": options.row_tokens, "ignore_eos": True}
    return {"custom_id": f"r{number}", "method": "POST", "url": _URL, "body": body}


async def _next_commit(options: argparse.Namespace, http: httpx.AsyncClient, batch_id: str, num_done: int) -> int:
    """Wait until more than `num_done` rows are done, and return their number. All rows of a unit are done together."""
    deadline = time.monotonic() + options.start_s
    while (num_now := await _num_done(http, batch_id)) == num_done:
        if time.monotonic() > deadline:
            raise SystemExit("no request of the batch was answered in time")
        await asyncio.sleep(_POLL_S)
    return num_now


async def _num_done(http: httpx.AsyncClient, batch_id: str) -> int:
    counts = (await http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()["request_counts"]
    return int(counts["completed"])


def _flags(options: argparse.Namespace) -> list[str]:
    engine_flags = ["--engine", "fake", "--fake", json.dumps({"token_s": options.token_s})]
    if options.engine == "vllm":
        engine_flags = ["--model", options.name, "--max-model-len", "1024"]
    return [*engine_flags, "--max-num-seqs", str(options.slots), "--usd-per-hour", "1", "--heartbeat-s", "1"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for state, batches and logs")
    parser.add_argument("--output", type=Path, required=True, help="file for the result")
    parser.add_argument("--engine", choices=["fake", "vllm"], default="fake")
    parser.add_argument("--model", default="smollm2-135m", help="model of the real engine")
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=list(_WAYS), help="ways to run the batch")
    parser.add_argument("--slots", type=int, default=8, help="requests that an engine decodes at the same time")
    parser.add_argument("--per-s", type=float, default=0.5, help="mean number of interactive requests per second")
    parser.add_argument("--seconds", type=float, default=120, help="duration of the interactive requests")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each interactive request")
    parser.add_argument("--rows", type=int, default=2000, help="requests of the batch")
    parser.add_argument("--row-tokens", type=int, default=128, help="output tokens of each request of the batch")
    parser.add_argument("--token-s", type=float, default=0.05, help="seconds per token of the fake engine")
    parser.add_argument(
        "--start-s", type=float, default=400, help="time limit for the endpoint to start, and for the batch to commit"
    )
    options = parser.parse_args()
    options.name = "fake" if options.engine == "fake" else options.model
    return options


if __name__ == "__main__":
    main()
