"""Autoscaling: the load rises and falls, and the number of engines goes from its minimum to its maximum and back.

    python -m benchmarks.online.autoscaling --folder /tmp/scaling --output benchmarks/online/RESULT
    python -m benchmarks.online.autoscaling --engine vllm --max-replicas 2 --tokens 64 ...   the real one

The endpoint is an ordinary `peagle serve` with short scaling delays. Each client sends one request after another. The
number of clients rises in steps from one to `--clients`, and falls back to none. Twice a second, `/v1/live` reports the
number of engines and requests. With `--min-replicas 0` (the default), the last engine also stops, and another request
then waits for a cold start. Latencies of the fake engine say nothing about models, but Ray Serve scales it in the same
way.
"""

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from peagle.charts import Axes, line_chart, standalone
from tests.faults.clients import SentRequest, Tally, send_request
from tests.faults.endpoint import Endpoint, serving
from tests.origin import origin

_SAMPLE_S = 0.5
_NUM_POINTS = 12  # of a plotted line
_AXES = Axes(
    name="Engines and clients over time",
    x_name="seconds since the load began",
    y_name="engines, and clients",
    x_prefix="second ",
    decimals=1,
)


def main() -> None:
    """Measure, write OUTPUT.json and OUTPUT.svg, and print the summary."""
    options = _options()
    with serving(options.folder, _flags(options), start_s=options.start_s) as endpoint:
        run = asyncio.run(Run(endpoint, options).run_load())
    record = {
        **origin(" ".join(["python -m benchmarks.online.autoscaling", *_differing(options)])),
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "summary": (summary := summarise(run["samples"], run["asked"], run["cold"])),
        **run,
    }
    options.output.with_suffix(".json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    options.output.with_suffix(".svg").write_text(plot(run["samples"], options.engine), encoding="utf-8")
    print(json.dumps(summary, indent=2))  # noqa: T201


class Run:
    """One rise and fall of the load on a running endpoint."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace) -> None:
        self._endpoint, self._options = endpoint, options
        self._started = time.monotonic()
        self._num_clients = 0
        self._samples: list[dict[str, float]] = []
        self._tally = Tally()

    async def run_load(self) -> dict[str, Any]:
        """Return samples of the load, the requests, and the request with a cold start."""
        options, self._started = self._options, time.monotonic()
        sampler = asyncio.create_task(self._sample())
        clients = [asyncio.create_task(self._send_requests(number)) for number in range(options.clients)]
        for number in staircase(options.clients, options.steps):
            self._num_clients = number
            await asyncio.sleep(options.step_s)
        self._num_clients = 0
        await self._wait_for_min_replicas()
        for client in clients:
            client.cancel()
        cold_request = await self._cold_start() if options.min_replicas == 0 else None
        await asyncio.sleep(options.step_s)
        sampler.cancel()
        await asyncio.gather(sampler, *clients, return_exceptions=True)
        requests = [self._request_record(request) for request in self._tally.requests]
        return {
            "samples": self._samples,
            "asked": requests,
            "cold": cold_request and self._request_record(cold_request),
        }

    async def _send_requests(self, client: int) -> None:
        async with httpx.AsyncClient(base_url=self._endpoint.url, timeout=self._options.start_s) as http:
            for number in itertools.count():
                while client >= self._num_clients:
                    await asyncio.sleep(0.1)
                text = f"client {client}, request {number}"
                request = await send_request(http, text, self._options.tokens, is_stream=True, model=self._options.name)
                self._tally.requests.append(request)
                if request.outcome != "answered":
                    await asyncio.sleep(1.0)

    async def _sample(self) -> None:
        while True:
            load = await asyncio.to_thread(self._endpoint.load, self._options.name)
            if load:
                self._samples.append({"at_s": self._now(), "num_clients": self._num_clients, **load})
            await asyncio.sleep(_SAMPLE_S)

    async def _wait_for_min_replicas(self) -> None:
        """Wait until only the minimum number of engines is running, and none is starting."""
        deadline = time.monotonic() + self._options.start_s
        expected = {"num_running_replicas": self._options.min_replicas, "num_starting_replicas": 0}
        while time.monotonic() < deadline:
            await asyncio.sleep(_SAMPLE_S)
            if self._samples and all(self._samples[-1][name] == number for name, number in expected.items()):
                return

    async def _cold_start(self) -> SentRequest:
        """Send a request while no engine is running."""
        async with httpx.AsyncClient(base_url=self._endpoint.url, timeout=self._options.start_s) as http:
            return await send_request(
                http, "are you there?", self._options.tokens, is_stream=True, model=self._options.name
            )

    def _request_record(self, request: SentRequest) -> dict[str, Any]:
        return {
            "began_s": request.began - self._started,
            "latency_s": request.latency_s,
            "outcome": request.outcome,
            "status": request.status,
        }

    def _now(self) -> float:
        return time.monotonic() - self._started


def staircase(max_clients: int, steps: int) -> list[int]:
    """Return the numbers of clients over time, up and down again.

    >>> staircase(9, 3)
    [1, 5, 9, 9, 5, 1]
    """
    up = [1 + round((max_clients - 1) * step / (steps - 1)) for step in range(steps)]
    return up + up[::-1]


def summarise(
    samples: list[dict[str, float]], requests: list[dict[str, Any]], cold_request: dict[str, Any] | None
) -> dict[str, Any]:
    """Summarise the numbers of engines, when they had their maximum, and the latencies of requests."""
    running = [sample["num_running_replicas"] for sample in samples]
    max_engines = max(running)
    times_at_max = [sample["at_s"] for sample in samples if sample["num_running_replicas"] == max_engines]
    latencies = [request["latency_s"] for request in requests if request["outcome"] == "answered"]
    outcomes = sorted({request["outcome"] for request in requests})
    return {
        "num_engines": [number for number, _ in itertools.groupby(running)],
        "most_engines": max_engines,
        "most_first_s": times_at_max[0],
        "most_last_s": times_at_max[-1],
        "num_requests": len(requests),
        "outcomes": {name: sum(request["outcome"] == name for request in requests) for name in outcomes},
        "latency_p50_s": float(np.percentile(latencies, 50)),
        "latency_p95_s": float(np.percentile(latencies, 95)),
        "cold_start_s": cold_request["latency_s"] if cold_request and cold_request["outcome"] == "answered" else None,
        "cold_outcome": cold_request and cold_request["outcome"],
    }


def plot(samples: list[dict[str, float]], engine: str) -> str:
    """Return an SVG plot of clients, running requests and running engines over time."""
    last = samples[-1]["at_s"]
    times = [last * point / _NUM_POINTS for point in range(_NUM_POINTS + 1)]
    nearest_samples = [min(samples, key=lambda sample: abs(sample["at_s"] - time_s)) for time_s in times]
    lines = {
        "clients": "num_clients",
        "running requests": "num_requests_under_way",
        "running engines": "num_running_replicas",
    }
    curves = [(name, [(round(s["at_s"]), float(s[key])) for s in nearest_samples]) for name, key in lines.items()]
    kind = "fake engine" if engine == "fake" else "real engine"
    return standalone(line_chart(curves, _AXES), f"Engines follow the load ({kind})", list(lines))


def _flags(options: argparse.Namespace) -> list[str]:
    engine_flags = ["--engine", "fake", "--fake", options.fake]
    if options.engine == "vllm":
        engine_flags = ["--model", options.name, "--max-model-len", "512"]
    return [
        *engine_flags, "--min-replicas", str(options.min_replicas), "--max-replicas", str(options.max_replicas),
        "--max-num-seqs", str(options.slots), "--max-queued-requests", str(2 * options.clients),
        "--upscale-delay-s", str(options.upscale_delay_s), "--downscale-delay-s", str(options.downscale_delay_s),
        "--usd-per-hour", "1", "--drain-s", "10",
    ]  # fmt: skip


def _options() -> argparse.Namespace:
    options = _parser().parse_args()
    options.name = "fake" if options.engine == "fake" else options.model
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the endpoint's state")
    parser.add_argument("--output", type=Path, required=True, help="path of the JSON and SVG files, without a suffix")
    parser.add_argument("--engine", choices=["fake", "vllm"], default="fake")
    parser.add_argument("--model", default="smollm2-135m", help="model of the real engine")
    parser.add_argument("--min-replicas", type=int, default=0)
    parser.add_argument("--max-replicas", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4, help="requests that an engine decodes at the same time")
    parser.add_argument("--clients", type=int, default=12, help="maximum number of clients")
    parser.add_argument("--steps", type=int, default=3, help="number of steps up, and of steps down")
    parser.add_argument("--step-s", type=float, default=30)
    parser.add_argument("--tokens", type=int, default=40, help="output tokens of each request")
    parser.add_argument("--fake", default='{"token_s": 0.05}', help="traits of the fake engine")
    parser.add_argument("--upscale-delay-s", type=float, default=5)
    parser.add_argument("--downscale-delay-s", type=float, default=10)
    parser.add_argument("--start-s", type=float, default=300, help="time limit for starts, in seconds")
    return parser


def _differing(options: argparse.Namespace) -> list[str]:
    """Return the flags without default values; folders are omitted, since they are private."""
    words = []
    for action in _parser()._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest not in ("folder", "output", "help") and value != action.default:
            words += [action.option_strings[0], str(value)]
    return words


if __name__ == "__main__":
    main()
