"""`peagle ledger compact`: many small files of a ledger become few."""

import argparse
import time
from typing import Any

HELP = """\
Put the many small files of ledgers into few, each whole as before: of requests, of heartbeats, of engine processes.
Nothing else changes: `peagle cost`, budgets and endpoints see the same.

  peagle ledger compact runs/serve
  peagle ledger compact 'runs/*' s3://bucket/runs/nightly

It may run beside engines, readers and an endpoint, and may be killed at any moment; the same command goes on. Only
files of processes that have ended are taken: those that said so an hour ago, and those that have been silent for a day.

A SOURCE is a run directory, the --state folder of `peagle serve`, or a glob of them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle ledger compact`."""
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="run directory, --state folder, or a glob of them; local or s3://"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Put the files of each ledger together."""
    from peagle.economics.compaction import compact
    from peagle.runs.ledgers import ledger_folders

    result = {}
    for name, ledger in ledger_folders(args.sources).items():
        done = compact(ledger, time.time())
        print(f"{name}: files before {done.num_before:,}, now {done.num_after:,}")
        result[name] = {"num_files_before": done.num_before, "num_files": done.num_after}
    return 0, {"ledgers": result}
