"""`peagle cost`: the spending of runs and endpoints in a period."""

import argparse
import calendar
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.economics.spending import Days

FORMATS = ("table", "csv", "json", "html", "md", "focus")
HELP = """\
Say what runs and endpoints cost in a period: work, overhead and losses, by key, model, tag or day. The lines add up to
the cent.

  peagle cost runs/* runs/serve --month 2026-11 --by key,model
  peagle cost s3://bucket/runs/* --from 2026-11-01 --to 2026-11-15 --by tag:team --format csv > team.csv
  peagle cost runs/serve --by day --format html > spending.html
  peagle cost runs/serve --month 2026-11 --format focus > focus.csv

Under "saved" it says what generation would have cost without the drafter, by step times that were measured: of the
catalog, of the profile, or of a benchmark that you name.

  peagle bench --model m --methods none,peagle ... --output runs/bench
  peagle cost runs/* --baseline runs/bench/report.json

A SOURCE is a run directory, the --state folder of `peagle serve`, the folder of a measurement or of a training, or a
glob of them. Days are UTC's, and both ends are included. Work counts on the day on which it is committed. A cost
without a price is "unknown", never 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle cost`."""
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="run directory, --state folder, or a glob of them; local or s3://"
    )
    parser.add_argument("--month", metavar="YYYY-MM", help="the days of this month")
    parser.add_argument("--from", dest="first", metavar="DATE", help="from this day on")
    parser.add_argument("--to", dest="last", metavar="DATE", help="up to and including this day")
    parser.add_argument(
        "--by",
        default="run",
        metavar="LIST",
        help="of key, model, drafter, tag, tag:NAME, day, run, instance; empty for the total (default: %(default)s)",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="report.json of `peagle bench`, for what was saved"
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Add up, and print."""
    from peagle.economics.report.focus import focus_csv
    from peagle.economics.report.spending import FORMATS as WRITERS
    from peagle.economics.report.spending_page import html_statement
    from peagle.economics.spending import charges
    from peagle.economics.statement import dimensions, statement
    from peagle.plain_json import to_json
    from peagle.profiles.baselines import read_benchmark
    from peagle.runs.ledgers import find_ledgers

    by, days = dimensions(args.by), _days(args)
    benchmark = read_benchmark(args.baseline) if args.baseline else None
    found = find_ledgers(args.sources, benchmark)
    charged = [charge for ledger in found.ledgers for charge in charges(ledger, days)]
    result = statement(charged, by, days, found.notes)
    if args.format == "focus":
        print(focus_csv(charged))
    elif args.format == "json":
        print(to_json(result, indent=2))
    elif args.format == "html":
        layer = next((name for name in by if name != "day"), "key")
        print(html_statement(result, statement(charged, ("day", layer), days)))
    else:
        print(WRITERS[args.format](result))
    return 0, result


def _days(args: argparse.Namespace) -> "Days":
    """The period that is asked for.

    Raises:
        ConfigError: it is no month or no date, both are given, or it ends before it begins.
    """
    from peagle.economics.spending import Days, day_number
    from peagle.errors import ConfigError

    try:
        if args.month is None:
            ends = (None if text is None else day_number(date.fromisoformat(text)) for text in (args.first, args.last))
            return Days(*ends)
        if args.first is not None or args.last is not None:
            raise ConfigError("--month is a whole period: leave out --from and --to")
        first = date.fromisoformat(f"{args.month}-01")
        last = first.replace(day=calendar.monthrange(first.year, first.month)[1])
        return Days(day_number(first), day_number(last))
    except ValueError as error:
        raise ConfigError(
            f"the period: {error}", hint="write --month 2026-11, or --from 2026-11-01 --to 2026-11-30"
        ) from error
