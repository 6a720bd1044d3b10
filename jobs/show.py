"""`peagle show`: print the responses and the failed rows of a run."""

import argparse
import itertools
from typing import Any

from peagle.plain_json import to_json

HELP = """\
Print the responses of a run in the order of the corpus, then the rows that failed.

  peagle show runs/first
  peagle show runs/first --limit 3 --format jsonl
  peagle show runs/first --failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, local or s3://BUCKET/FOLDER")
    parser.add_argument("--limit", type=int, metavar="N", help="print at most N responses and N failed rows")
    parser.add_argument("--failed", action="store_true", help="print only the failed rows")
    parser.add_argument(
        "--format", choices=("text", "jsonl"), default="text", help="jsonl: all columns (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError
    from peagle.runs.results import Run

    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    run = Run.open(args.run)
    is_text = args.format == "text"
    columns = ("id", "response") if is_text else None
    rows = iter(()) if args.failed else itertools.islice(run.rows(columns), args.limit)
    failed = itertools.islice(run.failed_rows(), args.limit)
    result = {"num_rows": 0, "num_failed_rows": 0}
    for row in rows:
        print(_response_text(row) if is_text else to_json(row))
        result["num_rows"] += 1
    for dead_letter in failed:
        print(_failure_text(dead_letter) if is_text else to_json(dead_letter))
        result["num_failed_rows"] += 1
    if is_text and not any(result.values()):
        print("no failed rows" if args.failed else "no rows are committed yet")
    return 0, result


def _response_text(row: dict[str, Any]) -> str:
    from peagle.runs.export import printable

    lines = str(row["response"]).strip("\n").splitlines()
    return "\n".join([printable(str(row["id"])), *(f"  | {printable(line)}" for line in lines)])


def _failure_text(dead_letter: dict[str, Any]) -> str:
    from peagle.runs.export import printable

    return printable(f"{dead_letter['id']}  failed: {dead_letter['reason']}: {dead_letter['message']}")
