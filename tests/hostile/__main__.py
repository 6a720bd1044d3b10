"""`python -m tests.hostile`: attack the endpoint with one key while another key is in use, and write the report.

The exit code is 1 if an attack succeeded or slowed the other key too much.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from benchmarks.same_engine import take_cores
from tests.chaos.ray_nodes import ROOT
from tests.hostile import report
from tests.hostile.attacks import ATTACKS, NORMAL_REQUESTS
from tests.hostile.scenes import ALL, play
from tests.hostile.tenants import tenants
from tests.origin import say

_MODELS = {"fake": "fake", "vllm": "smollm2-135m"}


def main() -> int:
    args = _parser().parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    names = list(args.only)
    with tenants(
        args.folder,
        [NORMAL_REQUESTS, *names, ALL],
        engine=args.engine,
        model=_MODELS[args.engine],
        tokens=args.tokens,
        start_s=args.start_s,
        has_own_cores=args.engine == "vllm" and not args.shared_cores,
    ) as (endpoint, keys):
        say(f"up at {endpoint.url}")
        rows = play(endpoint, keys, names, args.seconds, say=say)
    take_cores()  # the report describes the whole machine
    path = report.write(args.report, rows, engine=args.engine, command=_command(args))
    say(f"report: {path}")
    return int(any(row["problems"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--engine", choices=sorted(_MODELS), default="vllm", help="default vllm")
    parser.add_argument("--seconds", type=float, default=30, help="seconds of each scene; default 30")
    parser.add_argument("--tokens", type=int, default=8, help="output tokens of the neighbour's requests; default 8")
    parser.add_argument(
        "--shared-cores",
        action="store_true",
        help="let other processes use the vLLM engine's cores; by default the engine has them exclusively, like a GPU",
    )
    parser.add_argument("--start-s", type=float, default=300, help="maximum seconds for a start; default 300")
    parser.add_argument(
        "--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK", help=", ".join(ATTACKS)
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "hostile", help="folder for the endpoint's state"
    )
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks" / "online", help="folder for the report")
    return parser


def _command(args: argparse.Namespace) -> str:
    parts = ["python -m tests.hostile", f"--engine {args.engine}", f"--seconds {args.seconds:g}"]
    if args.shared_cores:
        parts.append("--shared-cores")
    if list(args.only) != list(ATTACKS):
        parts.append(f"--only {shlex.join(args.only)}")
    return " ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
