"""`peagle status`: show a run's progress, from another terminal or machine."""

import argparse
import time
from typing import Any

HELP = """\
Show a run's progress from its directory, without its driver or cluster.

  peagle status runs/first
  peagle status runs/first --watch 5
  peagle status runs/first --json -        print only JSON
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, local or s3://BUCKET/FOLDER")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="repeat every SECONDS while the run is running")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError
    from peagle.runs.directory import RunDirectory
    from peagle.runs.status import StatusReader

    if args.watch is not None and not args.watch > 0:
        raise ConfigError(f"--watch must be above 0, got {args.watch:g}")
    reader = StatusReader(RunDirectory(args.run))
    is_json_only = str(args.json) == "-"
    while True:
        status = reader.read()
        if not is_json_only:
            print(status.describe(), flush=True)
        if args.watch is None or status.state != "running":
            return 0, status.to_dict()
        time.sleep(args.watch)
