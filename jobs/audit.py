"""`peagle audit`: check a run against its plan, and its text against the target."""

import argparse
import sys
from typing import Any

HELP = """\
Audit a run: compare its files with its plan, and a sample of its rows with what the target generates without a drafter.

Files: every unit exists, every id is in exactly one row or dead letter, the recorded usage is the sum over the rows,
the ledger agrees, no temporary files remain and the input is unchanged. Rows: the sample is generated again without
the drafter, with the same engine settings, and compared token by token. This verifies that speculative decoding did not
change the text.

  peagle audit runs/first
  peagle audit runs/first --sample 64 --seed 1
  peagle audit runs/first --no-regenerate      check only files; start no engine
  peagle audit runs/first --json -             print only JSON

Where two texts differ, the log-probabilities of the two tokens decide: if they are nearly equal, it is a rounding tie
(the limit depends on the precision), otherwise a difference. Rows at a temperature above 0 cannot be compared and are
skipped. The engine runs in this process, without Ray; nothing is written into the run directory.
"""
EPILOG = """\
exit codes: 0 clean, 1 a file does not match the plan or a text differs by more than a tie, 2 bad usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, local or s3://BUCKET/FOLDER")
    parser.add_argument("--sample", type=int, default=16, metavar="N", help="rows to generate again (default: 16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sample (default: 0)")
    parser.add_argument("--no-regenerate", action="store_true", help="check the files only")
    parser.add_argument(
        "--max-tie", type=float, metavar="X", help="largest margin of a rounding tie (default: by the run's precision)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError
    from peagle.runs.audit import audit
    from peagle.runs.directory import RunDirectory
    from pipelines.cluster.node import start_only_engine

    if args.sample < 1:
        raise ConfigError(f"--sample must be at least 1, got {args.sample}", hint="use --no-regenerate to check files")
    if args.max_tie is not None and not args.max_tie >= 0:
        raise ConfigError(f"--max-tie must be 0 or more, got {args.max_tie:g}")
    is_json_only = str(args.json) == "-"
    audit_result = audit(
        RunDirectory(args.run),
        num_rows=0 if args.no_regenerate else args.sample,
        seed=args.seed,
        max_tie=args.max_tie,
        announce=lambda message: None if is_json_only else print(message, flush=True),
        start=start_only_engine,
    )
    if not is_json_only:
        print(audit_result.describe())
    return (0 if audit_result.is_clean else 1), audit_result.to_dict()


if __name__ == "__main__":
    from jobs.cli import main

    main(["audit", *sys.argv[1:]])
