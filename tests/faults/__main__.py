"""`python -m tests.faults`: kill each part of the endpoint under load, then overload it, and write the report.

The exit code is 1 if a request had a forbidden outcome or was billed twice, or if a slot was lost.
"""

import argparse
import asyncio
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.chaos.ray_nodes import ROOT
from tests.faults import report
from tests.faults.arrivals import overload
from tests.faults.endpoint import PARTS, Endpoint, Size, serving
from tests.faults.scenes import CLIENTS_DISCONNECT, disconnect_clients, kill_part
from tests.origin import say

OVERLOAD = "overload"
_FAULTS = [CLIENTS_DISCONNECT, *PARTS, OVERLOAD]


def main() -> int:
    args = _parser().parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    size = Size()
    with serving(args.folder, size.flags(), start_s=args.start_s) as endpoint:
        say(f"the endpoint is up at {endpoint.url}")
        results, overload_result = asyncio.run(_run_faults(args, endpoint, size))
    path = report.write(args.report, results, overload_result, command=_command(args))
    say(f"report: {path}")
    return int(any(result["problems"] for result in results))


async def _run_faults(
    args: argparse.Namespace, endpoint: Endpoint, size: Size
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    if await asyncio.to_thread(endpoint.wait_until_complete, size.max_replicas, args.start_s) is None:
        raise SystemExit(f"not all processes of the endpoint were running after {args.start_s:g} s")
    results: list[dict[str, Any]] = []
    for fault in (name for name in (CLIENTS_DISCONNECT, *PARTS) if name in args.only):
        say(fault)
        if fault == CLIENTS_DISCONNECT:
            results.append(await disconnect_clients(endpoint, size, num_clients=size.admitted))
        else:
            results.append(
                await kill_part(
                    endpoint, size, fault, num_clients=args.clients, before_s=args.seconds, after_s=args.seconds,
                    max_recovery_s=args.start_s,
                )
            )  # fmt: skip
        say(f"  {results[-1]}")
    if OVERLOAD not in args.only:
        return results, None
    say(OVERLOAD)
    overload_result = await overload(endpoint.url, size, factor=2, seconds=args.overload_s, seed=1)
    say(f"  {overload_result}")
    return results, overload_result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients; default 16")
    parser.add_argument(
        "--seconds", type=float, default=10, help="seconds of load before and after each kill; default 10"
    )
    parser.add_argument(
        "--overload-s", type=float, default=120, help="seconds of requests at twice the capacity; default 120"
    )
    parser.add_argument(
        "--start-s",
        type=float,
        default=300,
        help="maximum seconds until all parts run, at the start and after a kill; default 300",
    )
    parser.add_argument("--only", nargs="+", choices=_FAULTS, default=_FAULTS, metavar="FAULT", help=", ".join(_FAULTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "faults", help="folder for the endpoint's state")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks" / "online", help="folder for the report")
    return parser


def _command(args: argparse.Namespace) -> str:
    parts = ["python -m tests.faults", f"--clients {args.clients}", f"--seconds {args.seconds:g}"]
    parts.append(f"--overload-s {args.overload_s:g}")
    if set(args.only) != set(_FAULTS):
        parts.append(f"--only {shlex.join(args.only)}")
    return " ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
