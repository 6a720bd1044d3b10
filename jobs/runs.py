"""`peagle runs`: list runs with their state and cost."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.runs.status import RunStatus

HELP = """\
List the bulk runs in folders and their subfolders: state, rows, tokens, cost and age.

  peagle runs
  peagle runs s3://bucket/runs
  peagle runs runs/july runs/august --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", default=["runs"], help="local or s3://BUCKET/FOLDER (default: runs)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError
    from peagle.runs.results import find_runs
    from peagle.runs.status import StatusReader
    from peagle.storage import storage_path
    from peagle.tables import aligned

    folders = [storage_path(folder) for folder in args.folders]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: the folder does not exist", hint="name the folder that contains your runs")
    runs = {str(run): run for folder in folders for run in find_runs(folder)}
    started_at = {path: run.manifest()["created_at"] for path, run in runs.items()}
    rows: list[Sequence[str]] = [("run", "state", "rows", "failed", "output tokens", "cost", "started")]
    result = []
    for path in sorted(runs, key=lambda path: float(started_at[path])):
        status = StatusReader(runs[path]).read()
        result.append({**status.to_dict(), "started_at": started_at[path]})
        rows.append(_row(status, started_at[path]))
    print("\n".join(aligned(rows)) if result else f"no runs in {', '.join(map(str, folders))}")
    return 0, {"runs": result}


def _row(status: "RunStatus", started_at: float) -> tuple[str, ...]:
    from peagle.economics.report.figures import format_duration, format_usd

    return (
        status.path,
        status.state,
        f"{status.num_rows_done:,}/{status.num_rows:,}",
        f"{status.num_failed_rows:,}",
        f"{status.num_output_tokens:,}",
        format_usd(status.usd),
        f"{format_duration(time.time() - started_at)} ago",
    )
