"""An overload: requests at a fixed mean rate and random times (a seeded Poisson process), half of them streaming."""

import asyncio
import random
import time
from typing import Any

import httpx
import numpy as np

from tests.faults.clients import Tally, send_request
from tests.faults.endpoint import Size

_TIMEOUT = httpx.Timeout(120.0, connect=30.0)


async def overload(url: str, size: Size, *, factor: float, seconds: float, seed: int) -> dict[str, Any]:
    """Send requests at `factor` times the capacity; return the statistics."""
    rate, rng, tally = factor * size.capacity_per_s, random.Random(seed), Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits) as http:

        async def send(number: int) -> None:
            tally.requests.append(await send_request(http, f"arrival {number}", size.tokens, is_stream=number % 2 == 0))

        tasks, started, next_at = [], time.monotonic(), 0.0
        while (next_at := next_at + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, started + next_at - time.monotonic()))
            tasks.append(asyncio.create_task(send(len(tasks))))
        sent_s = time.monotonic() - started
        await asyncio.gather(*tasks)
    return statistics(tally, size, factor=factor, seconds=sent_s)


def statistics(tally: Tally, size: Size, *, factor: float, seconds: float) -> dict[str, Any]:
    """Return the report's numbers: counts and latencies. `alone_s` is the latency of a request without other load."""
    latencies = [request.latency_s for request in tally.requests if request.outcome == "answered"]
    refusals = [request.latency_s for request in tally.requests if request.outcome == "refused"]
    return {
        "factor": factor,
        "capacity_per_s": size.capacity_per_s,
        "seconds": seconds,
        "num_requests": len(tally.requests),
        "outcomes": tally.outcomes(),
        "share_refused": len(refusals) / max(1, len(tally.requests)),
        "alone_s": size.tokens * size.token_s,
        "latency_p50_s": float(np.percentile(latencies, 50)) if latencies else None,
        "latency_p95_s": float(np.percentile(latencies, 95)) if latencies else None,
        "latency_max_s": max(latencies, default=None),
        "refusal_p95_s": float(np.percentile(refusals, 95)) if refusals else None,
        "seen": sorted({request.details for request in tally.requests if request.details}),
    }
