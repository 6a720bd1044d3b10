"""`peagle ledger compact`: merge the small files of ledgers."""

import argparse
import time
from typing import Any

HELP = """\
Merge the many small files of ledgers (requests, heartbeats, engine processes) into a few files, each written
atomically. Nothing else changes: `peagle cost`, budgets and endpoints see the same records.

  peagle ledger compact runs/serve
  peagle ledger compact 'runs/*' s3://bucket/runs/nightly

The command can run while engines, readers and an endpoint use the ledger, and can be killed at any time: run it again
to continue. It only merges files of processes that ended an hour ago, or have been silent for a day.

A SOURCE is a run directory, the --state folder of `peagle serve`, or a glob of them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="run directory, --state folder, or a glob of them; local or s3://"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.compaction import compact
    from peagle.runs.ledgers import ledger_folders

    result = {}
    for name, ledger in ledger_folders(args.sources).items():
        compaction = compact(ledger, time.time())
        print(f"{name}: files before {compaction.num_before:,}, now {compaction.num_after:,}")
        result[name] = {"num_files_before": compaction.num_before, "num_files": compaction.num_after}
    return 0, {"ledgers": result}
