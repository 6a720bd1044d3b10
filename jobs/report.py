"""`peagle report`: write and print the reports of runs."""

import argparse
from pathlib import Path
from typing import Any

HELP = """\
Report on runs: tokens per dollar, acceptance, costs.

  peagle report runs/first                        writes report.json and report.html into the run directory
  peagle report runs/a runs/b --html both.html    compares them side by side

For an endpoint, use `peagle cost STATE`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, local or s3://BUCKET/FOLDER")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page that compares the runs")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.report.html import render_html
    from peagle.economics.report.text import text_summary
    from peagle.files import write_atomic
    from peagle.runs.directory import RunDirectory
    from peagle.runs.ledgers import require_runs
    from peagle.runs.report import make_report

    require_runs(args.runs)
    runs = [RunDirectory(location) for location in args.runs]
    reports = [make_report(run) for run in runs]
    for run, report in zip(runs, reports, strict=True):
        print(text_summary(report))
        print(f"report: {run.root / 'report.html'}\n")
    if args.html:
        write_atomic(args.html, render_html(reports).encode())
        print(f"comparison: {args.html}")
    return 0, {"reports": reports}
