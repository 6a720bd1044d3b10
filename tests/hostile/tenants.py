"""An endpoint with keys, the neighbour's clients, and the memory of the endpoint's processes."""

import asyncio
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.same_engine import leave_cores
from pipelines.online.gateway.keys import edit_keys, new_key
from tests.faults.clients import Tally, send_request
from tests.faults.endpoint import Endpoint, serving

NEIGHBOUR, ATTACKER, POOR, RESTRICTED = "neighbour", "attacker", "poor", "restricted"
BUDGET_USD = 1e-7  # less than the cost of one request
REQUESTS_PER_MIN = 600
PARALLEL_REQUESTS = 2
OTHER_MODEL = "other"
TIMEOUT = httpx.Timeout(120.0, connect=10.0)
_WATCHED = ("the ingress", "the proxy")


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """The endpoint and its keys.

    Attributes:
        model: the served name of the model.
        tokens: output tokens of each of the neighbour's requests.
        keys: API keys by name.
    """

    url: str
    model: str
    tokens: int
    keys: dict[str, str]

    def attacked_by(self, scene: str) -> Self:
        """Return the tenants with an attacker key for this scene, so that no scene uses up another scene's limits."""
        return replace(self, keys={**self.keys, ATTACKER: self.keys[attacker(scene)]})

    def client(self, name: str) -> httpx.AsyncClient:
        """Return a client with the key of this name."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT, limits=limits)


def attacker(scene: str) -> str:
    """Return the name of a scene's attacker key."""
    return f"{ATTACKER}-{scene.replace(' ', '-')}"


@contextmanager
def tenants(
    folder: Path,
    scenes: Collection[str],
    *,
    engine: str,
    model: str,
    tokens: int,
    start_s: float,
    has_own_cores: bool = False,
) -> Iterator[tuple[Endpoint, Tenants]]:
    """Run the endpoint with its keys: a neighbour, an attacker per scene, and two with tight limits.

    Args:
        has_own_cores: whether to keep all other processes off the cores of a vLLM engine. The endpoint has batches, so
            its engine is bound to only some cores; the others are reserved for the engine of batches.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key_file, keys = folder / "keys.json", {}
    limits = {"requests_per_min": REQUESTS_PER_MIN, "max_parallel_requests": PARALLEL_REQUESTS}
    with edit_keys(key_file, create=True) as records:
        limits_by_name: dict[str, dict[str, Any]] = {
            NEIGHBOUR: {},
            POOR: {"budget_usd": BUDGET_USD},
            RESTRICTED: {"models": (OTHER_MODEL,), "requests_per_min": 1},
            **{attacker(scene): limits for scene in scenes},
        }
        for name, key_limits in limits_by_name.items():
            keys[name], record = new_key(name, **key_limits)
            records.append(record)
    flags = [
        "--engine", engine, "--max-num-seqs", "4", "--usd-per-hour", "1", "--heartbeat-s", "1",
        "--keys", str(key_file), "--batches", str(folder / "batches"),
    ]  # fmt: skip
    # Short steps, because a prompt delays other requests by a step, and a step of 2,048 tokens takes seconds on CPUs.
    vllm_flags = ["--model", model, "--max-model-len", "2048", "--max-num-batched-tokens", "128"]
    flags += ["--fake", '{"token_s": 0.02}'] if engine == "fake" else vllm_flags
    with serving(folder, flags, start_s=start_s) as endpoint:
        if has_own_cores:
            leave_cores(os.getpid(), ",".join(map(str, _cores_of_engine())))
        yield endpoint, Tenants(url=endpoint.url, model=model, tokens=tokens, keys=keys)


def _cores_of_engine() -> list[int]:
    """Return the cores that vLLM's worker is bound to."""
    descendants = psutil.Process().children(recursive=True)
    return next(process.cpu_affinity() for process in descendants if "VLLM::Worker" in " ".join(process.cmdline()))


class Neighbour:
    """The neighbour's two clients, which send one request after another until `stop` is called."""

    def __init__(self, tenants: Tenants, endpoint: Endpoint) -> None:
        self.tally = Tally()
        self.peak_mib: dict[str, float] = {}
        self.grown_mib: dict[str, float] = {}
        self._tenants, self._endpoint = tenants, endpoint
        self._is_stopped = False
        self._tasks = [asyncio.create_task(self._send_requests(number)) for number in range(2)]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        """Stop sending requests, and wait for the running ones."""
        self._is_stopped = True
        await asyncio.gather(*self._tasks)

    async def _send_requests(self, client: int) -> None:
        async with self._tenants.client(NEIGHBOUR) as http:
            number = 0
            while not self._is_stopped:
                text = f"client {client}, request {number}, {time.time_ns()}"
                is_stream = (client + number) % 2 == 0
                result = await send_request(
                    http, text, self._tenants.tokens, is_stream=is_stream, model=self._tenants.model
                )
                self.tally.requests.append(result)
                number += 1

    async def _watch(self) -> None:
        initial_mib = await asyncio.to_thread(_rss_mib, self._endpoint)
        while not self._is_stopped:
            for part, mib in (await asyncio.to_thread(_rss_mib, self._endpoint)).items():
                self.peak_mib[part] = max(mib, self.peak_mib.get(part, 0.0))
                self.grown_mib[part] = self.peak_mib[part] - initial_mib[part]
            await asyncio.sleep(0.5)


def _rss_mib(endpoint: Endpoint) -> dict[str, float]:
    return {part: sum(map(_rss_bytes, endpoint.pids(part))) / 2**20 for part in _WATCHED}


def _rss_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
