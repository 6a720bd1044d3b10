"""The neighbour alone, then beside each attack, then beside all of them."""

import asyncio
import time
from typing import Any

import numpy as np

from tests.hostile.attacks import ATTACKS, Found
from tests.hostile.tenants import Neighbour, Tenants

QUIET, ALL = "quiet", "all at once"
MOST_TIMES_QUIET = 1.5
_MOST_GROWTH_MIB = 512


async def play(tenants: Tenants, names: list[str], seconds: float, *, say: Any) -> list[dict[str, Any]]:
    """A row a scene."""
    rows: list[dict[str, Any]] = []
    await _scene(tenants, "warm-up", [], min(seconds, 10.0))
    for name in [QUIET, *names, *([ALL] if len(names) > 1 else [])]:
        chosen = names if name == ALL else [one for one in names if one == name]
        row = await _scene(tenants, name, chosen, seconds)
        rows.append(row)
        if name != QUIET:
            _compare(row, rows[0])
        say(f"{name}: {row}")
    return rows


async def _scene(tenants: Tenants, name: str, attacks: list[str], seconds: float) -> dict[str, Any]:
    neighbour, began = Neighbour(tenants), time.monotonic()
    attacked = tenants.attacked_by(name) if attacks else tenants
    found: list[Found] = await asyncio.gather(*(ATTACKS[attack](attacked, seconds) for attack in attacks))
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    await neighbour.stop()
    outcomes = neighbour.tally.outcomes()
    latencies = [one.latency_s for one in neighbour.tally.asked if one.outcome == "answered"]
    row: dict[str, Any] = {
        "scene": name,
        "seconds": time.monotonic() - began,
        "num_requests": len(neighbour.tally.asked),
        "num_answered": outcomes["answered"],
        "latency_p50_s": float(np.percentile(latencies, 50)) if latencies else None,
        "latency_p95_s": float(np.percentile(latencies, 95)) if latencies else None,
        "peak_mib": neighbour.peak_mib,
        "grown_mib": neighbour.grown_mib,
        "statuses": _sum(found),
        "problems": [problem for one in found for problem in one.problems],
    }
    if outcomes["answered"] < len(neighbour.tally.asked):
        seen = sorted({one.seen for one in neighbour.tally.asked if one.seen})[:3]
        row["problems"].append(f"the neighbour's requests: {outcomes}; {seen}")
    return row


def _sum(found: list[Found]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for one in found:
        for status, number in one.statuses.items():
            totals[str(status)] = totals.get(str(status), 0) + number
    return dict(sorted(totals.items()))


def _compare(row: dict[str, Any], quiet: dict[str, Any]) -> None:
    if row["latency_p95_s"] is None or quiet["latency_p95_s"] is None:
        row["problems"].append("the neighbour was not answered")
        return
    row["times_quiet_p95"] = row["latency_p95_s"] / quiet["latency_p95_s"]
    if row["times_quiet_p95"] > MOST_TIMES_QUIET:
        row["problems"].append(f"p95 is {row['times_quiet_p95']:.2f} times the quiet one")
    for part, mib in row["grown_mib"].items():
        if mib > _MOST_GROWTH_MIB:
            row["problems"].append(f"{part} grew by {mib:.0f} MiB")
