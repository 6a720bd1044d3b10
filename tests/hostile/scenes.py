"""Measure the neighbour's requests without attacks, during each attack, and during all of them."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.same_engine import cpu_spent, cpu_times
from tests.faults.endpoint import Endpoint
from tests.hostile.attacks import NORMAL_REQUESTS, AttackResult, attack_together
from tests.hostile.tenants import Neighbour, Tenants

QUIET, ALL = "quiet", "all attacks"
MAX_TIMES_QUIET = 1.5
_MAX_GROWTH_MIB = 512


def play(
    endpoint: Endpoint, tenants: Tenants, names: list[str], seconds: float, *, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Play the scenes, with the attackers in a separate process; return the results by scene."""
    scenes = {
        QUIET: [],
        NORMAL_REQUESTS: [NORMAL_REQUESTS],
        **{name: [name] for name in names},
        **({ALL: names} if len(names) > 1 else {}),
    }
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as attackers:
        attack = partial(_attack, attackers)
        asyncio.run(_scene(endpoint, tenants, "warm-up", min(seconds, 10.0), attack(tenants, [], 0.0)))
        for name, attacks in scenes.items():
            scene_tenants = tenants if name == QUIET else tenants.attacked_by(name)
            row = asyncio.run(_scene(endpoint, tenants, name, seconds, attack(scene_tenants, attacks, seconds)))
            rows.append(row)
            if name != QUIET:
                _compare(row, rows[0], is_attack=name != NORMAL_REQUESTS)
            say(f"{name}: {row}")
    return rows


async def _attack(attackers: Executor, tenants: Tenants, names: list[str], seconds: float) -> list[AttackResult]:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(attackers, attack_together, tenants, names, seconds)


async def _scene(
    endpoint: Endpoint, tenants: Tenants, name: str, seconds: float, attack: Coroutine[Any, Any, list[AttackResult]]
) -> dict[str, Any]:
    neighbour, began, cpu_before = Neighbour(tenants, endpoint), time.monotonic(), cpu_times(os.getpid())
    results = await attack
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    await neighbour.stop()
    spent = cpu_spent(cpu_before, cpu_times(os.getpid()))
    outcomes = neighbour.tally.outcomes()
    latencies = [request.latency_s for request in neighbour.tally.requests if request.outcome == "answered"]
    row: dict[str, Any] = {
        "scene": name,
        "seconds": time.monotonic() - began,
        "num_requests": len(neighbour.tally.requests),
        "num_answered": outcomes["answered"],
        "latency_p50_s": float(np.percentile(latencies, 50)) if latencies else None,
        "latency_p95_s": float(np.percentile(latencies, 95)) if latencies else None,
        "peak_mib": neighbour.peak_mib,
        "grown_mib": neighbour.grown_mib,
        "cpu_s": {name: round(seconds, 1) for name, seconds in sorted(spent.items()) if seconds >= 0.1},
        "statuses": _sum_statuses(results),
        "problems": [problem for attack_result in results for problem in attack_result.problems],
    }
    if outcomes["answered"] < len(neighbour.tally.requests):
        details = sorted({request.details for request in neighbour.tally.requests if request.details})[:3]
        row["problems"].append(f"the neighbour's requests: {outcomes}; {details}")
    return row


def _sum_statuses(results: list[AttackResult]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for attack_result in results:
        for status, number in attack_result.statuses.items():
            totals[str(status)] = totals.get(str(status), 0) + number
    return dict(sorted(totals.items()))


def _compare(row: dict[str, Any], quiet: dict[str, Any], *, is_attack: bool) -> None:
    if row["latency_p95_s"] is None or quiet["latency_p95_s"] is None:
        row["problems"].append("the neighbour was not answered")
        return
    row["times_quiet_p95"] = row["latency_p95_s"] / quiet["latency_p95_s"]
    if is_attack and row["times_quiet_p95"] > MAX_TIMES_QUIET:
        row["problems"].append(f"p95 is {row['times_quiet_p95']:.2f} times the p95 without attacks")
    for part, mib in row["grown_mib"].items():
        if mib > _MAX_GROWTH_MIB:
            row["problems"].append(f"{part} grew by {mib:.0f} MiB")
