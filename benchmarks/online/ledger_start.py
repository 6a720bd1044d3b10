"""Measure how long a new ingress takes to read the spend of keys from a large ledger, with and without a checkpoint.

    python -m benchmarks.online.ledger_start --folder /tmp/ledger --num-lines 1000000 --output result.json

The script writes the ledger into the folder: requests of 20 keys over 30 days, in a file for each of ten engine
processes. Each start runs in its own process. During the start, a task of the event loop wakes every 10 ms; its delay
shows how long other requests would wait.
"""

import argparse
import asyncio
import multiprocessing
import resource
import time
from pathlib import Path
from random import Random
from typing import Any

from peagle.economics.usage import RequestUsage, UnitUsage
from peagle.files import write_json
from peagle.hardware import detect
from peagle.speculation import SpeculationStats
from pipelines.online.gateway.limits import KeyLimits
from pipelines.online.totals import CHECKPOINT_NAME, totals_of

_NUM_SESSIONS, _NUM_KEYS, _DAYS = 10, 20, 30
_START = 1_790_000_000.0
_WAKE_S = 0.01


def main() -> None:
    """Create the ledger, start three times, and write the durations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--num-lines", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_ledger(args.folder, args.num_lines)
    (args.folder / CHECKPOINT_NAME).unlink(missing_ok=True)
    starts = {}
    for name, num_new in (("without", 0), ("with", 0), ("with and 10,000 lines more", 10_000)):
        append(args.folder, "new", num_new, _START + _DAYS * 86_400)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            starts[name] = pool.apply(start, (args.folder,))
    hardware = detect()
    write_json(
        args.output,
        {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": f"{hardware.num_cpus} cores, {hardware.cpu_name}",
            "num_lines": args.num_lines,
            "ledger_bytes": sum(path.stat().st_size for path in args.folder.glob("requests-*.jsonl")),
            "checkpoint_bytes": (args.folder / CHECKPOINT_NAME).stat().st_size,
            "starts": starts,
        },
    )


def make_ledger(folder: Path, num_lines: int) -> None:
    """Write the ledger; each engine process has an equal number of lines, and its own part of the days."""
    lines_per_session = num_lines // _NUM_SESSIONS
    for session in range(_NUM_SESSIONS):
        path = folder / f"requests-{session}.jsonl"
        path.unlink(missing_ok=True)
        append(folder, str(session), lines_per_session, _START + session * _DAYS * 86_400 / _NUM_SESSIONS)


def append(folder: Path, session_id: str, num_lines: int, begins_at: float) -> None:
    """Append the requests of one engine process, spread evenly over its part of the days."""
    random, life_s = Random(session_id), _DAYS * 86_400 / _NUM_SESSIONS
    with (folder / f"requests-{session_id}.jsonl").open("ab") as file:
        for number in range(num_lines):
            ended_at = begins_at + life_s * number / num_lines
            file.write(_request(random, session_id, ended_at).to_json() + b"\n")


def _request(random: Random, session_id: str, ended_at: float) -> RequestUsage:
    busy_s, drafts = random.uniform(0.1, 3), random.randint(5, 60)
    return RequestUsage(
        request_id=random.randbytes(16).hex(),
        key=f"key-{random.randrange(_NUM_KEYS)}",
        model="smollm2-135m",
        drafter="head",
        outcome="ok",
        ttft_s=0.1,
        usd=busy_s * 1e-5,
        usage=UnitUsage(
            session_id=session_id,
            num_rows=1,
            num_failed_rows=0,
            num_prompt_tokens=random.randint(20, 2000),
            num_cached_tokens=0,
            num_output_tokens=3 * drafts,
            busy_s=busy_s,
            speculation=SpeculationStats(
                num_drafts=drafts, num_draft_tokens=3 * drafts, accepted_per_position=(drafts, drafts // 2, drafts // 3)
            ),
            started_at=ended_at - 4 * busy_s,
            finished_at=ended_at,
        ),
    )


def start(folder: Path) -> dict[str, Any]:
    """Read the ledger as an ingress does, until the spend of all keys is known."""
    return asyncio.run(_start(folder))


async def _start(folder: Path) -> dict[str, Any]:
    started_at, delays_s = time.monotonic(), []
    KeyLimits(totals_of(folder))
    built_s = time.monotonic() - started_at
    while not totals_of(folder).is_loaded:
        slept_at = time.monotonic()
        await asyncio.sleep(_WAKE_S)
        delays_s.append(time.monotonic() - slept_at - _WAKE_S)
    known_s = time.monotonic() - started_at
    delays_s.sort()
    totals_of(folder).catch_up()  # the checkpoint is written by now
    return {
        "built_s": round(built_s, 4),
        "known_s": round(known_s, 2),
        "loop_late_p50_ms": round(1e3 * delays_s[len(delays_s) // 2], 2),
        "loop_late_p99_ms": round(1e3 * delays_s[len(delays_s) * 99 // 100], 2),
        "loop_late_max_ms": round(1e3 * delays_s[-1], 2),
        "num_cells": len(totals_of(folder).cells),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
