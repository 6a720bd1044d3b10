"""`peagle export`: the rows of a run as Parquet, JSON lines or OpenAI batch files."""

import argparse
from dataclasses import asdict
from typing import Any

HELP = """\
Export the rows of a run, from its committed units.

  peagle export runs/first --format jsonl          runs/first/export/jsonl/{output,errors}.jsonl
  peagle export runs/first --format openai-batch   OpenAI's batch output and error files
  peagle export runs/first --format parquet        all rows in one file

An export can be repeated at any time: files are replaced atomically, and the same run produces the same bytes.
`peagle generate --output-format FORMAT` exports at the end of a run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, local or s3://BUCKET/FOLDER")
    parser.add_argument("--format", required=True, metavar="FORMAT", help="parquet, jsonl or openai-batch")
    parser.add_argument("--partial", action="store_true", help="export the committed rows of an unfinished run")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError, did_you_mean
    from peagle.runs.directory import RunDirectory
    from peagle.runs.export import FORMATS, export

    if args.format not in FORMATS:
        raise ConfigError(f"--format {args.format}: unknown", hint=did_you_mean(args.format, FORMATS))
    exported = export(RunDirectory(args.run), args.format, partial=args.partial)
    print(exported.describe())
    return 0, asdict(exported)
