"""`peagle cost`: the spending of runs and endpoints in a period."""

import argparse
import calendar
import math
import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import removed

if TYPE_CHECKING:
    from peagle.economics.spending import Days

FORMATS = ("table", "csv", "json", "html", "focus")
HELP = """\
Show what runs and endpoints cost in a period: work, overhead and losses, by key, model, tag or day. Rounded amounts add
up exactly.

  peagle cost runs/* runs/serve --month 2026-11 --by key,model
  peagle cost s3://bucket/runs/* --from 2026-11-01 --to 2026-11-15 --by tag:team --format csv > team.csv
  peagle cost runs/serve --by day --format html > spending.html
  peagle cost runs/serve --month 2026-11 --format focus > focus.csv
  peagle cost runs/serve --month 2026-11 --currency EUR --rate 0.86      # at your rate
  peagle cost runs/* --month 2026-11 --nodes-usd-per-hour 0.38           # with the cluster's head and CPU nodes

The section "saved" compares the cost with generation without the drafter, using step times from the catalog, the
profile or a benchmark:

  peagle bench --model m --methods none,peagle ... --output runs/bench
  peagle cost runs/* --baseline runs/bench/report.json

A SOURCE is a run directory, the --state folder of `peagle serve`, the output folder of a measurement or training, or a
glob of them. Days are in UTC; the first and the last day are included. Work is counted on the day of its commit.
A cost without a price is "unknown", never 0.
"""
COMMON = ("month", "first", "last", "by", "format", "baseline", "currency", "rate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="run directory, --state folder, or a glob of them; local or s3://"
    )
    parser.add_argument("--month", metavar="YYYY-MM", help="a calendar month")
    parser.add_argument("--from", dest="first", metavar="DATE", help="first day")
    parser.add_argument("--to", dest="last", metavar="DATE", help="last day")
    parser.add_argument(
        "--by",
        default="run",
        metavar="LIST",
        help="dimensions: key, model, drafter, tag, tag:NAME, day, run, instance; empty for the total "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="report.json of `peagle bench`, to compute savings"
    )
    parser.add_argument(
        "--nodes-usd-per-hour",
        type=float,
        metavar="X",
        help="price of all head and CPU nodes, charged while an engine of these sources is running",
    )
    parser.add_argument(
        "--currency", metavar="CODE", help="convert amounts to this currency; FOCUS then uses only this currency"
    )
    parser.add_argument("--rate", type=float, metavar="X", help="amount of --currency per dollar")
    parser.add_argument("--format", type=_check_format, choices=FORMATS, default="table", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.report.focus import focus_csv
    from peagle.economics.report.spending import csv_statement, html_statement, text_statement
    from peagle.economics.spending import charges, node_charges
    from peagle.economics.statement import convert_currency, parse_dimensions, statement
    from peagle.plain_json import to_json
    from peagle.profiles.baselines import read_benchmark
    from peagle.runs.ledgers import find_ledgers

    by, days, currency = parse_dimensions(args.by), days_of(args.month, args.first, args.last), _currency(args)
    benchmark = read_benchmark(args.baseline) if args.baseline else None
    found_ledgers = find_ledgers(args.sources, benchmark)
    all_charges = [charge for ledger in found_ledgers.ledgers for charge in charges(ledger, days)]
    if args.nodes_usd_per_hour is not None:
        sessions = [session for ledger in found_ledgers.ledgers for session in ledger.sessions]
        all_charges += node_charges(sessions, days, _require_positive("--nodes-usd-per-hour", args.nodes_usd_per_hour))
    result = statement(all_charges, by, days, found_ledgers.notes)
    if currency:
        result = convert_currency(result, *currency)
        result["notes"].append(f"Converted at {currency[1]:g} {currency[0]} per dollar on all days.")
    if args.format == "focus":
        print(focus_csv(all_charges, *(currency or ())))
    elif args.format == "json":
        print(to_json(result, indent=2))
    elif args.format == "html":
        stacked_by = next((name for name in by if name != "day"), "key")
        print(html_statement(result, statement(all_charges, ("day", stacked_by), days)))
    else:
        print(csv_statement(result) if args.format == "csv" else text_statement(result))
    return 0, result


def _check_format(name: str) -> str:
    if replacement := removed.VALUES.get(("format", name)):
        raise argparse.ArgumentTypeError(f"{name!r} was removed: {replacement}")
    return name


def _currency(args: argparse.Namespace) -> tuple[str, float] | None:
    from peagle.errors import ConfigError

    if args.currency is None and args.rate is None:
        return None
    if args.currency is None or args.rate is None:
        raise ConfigError("--currency and --rate must be set together", hint="for example --currency EUR --rate 0.86")
    if not re.fullmatch("[A-Z]{3}", args.currency):
        raise ConfigError(f"{args.currency!r} is not a currency code", hint="use an ISO 4217 code like EUR")
    return args.currency, _require_positive("--rate", args.rate)


def _require_positive(flag: str, value: float) -> float:
    from peagle.errors import ConfigError

    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} must be a positive number, got {value:g}")
    return value


def days_of(month: str | None, first: str | None, last: str | None) -> "Days":
    """Return a period from a month (2026-11), or from its first and last day (2026-11-30).

    None leaves that end of the period open.

    Raises:
        ConfigError: a date is invalid, or a month is combined with days.
    """
    from peagle.economics.spending import Days, day_number
    from peagle.errors import ConfigError

    try:
        if month is None:
            ends = (None if day is None else day_number(date.fromisoformat(day)) for day in (first, last))
            return Days(*ends)
        if first is not None or last is not None:
            raise ConfigError("--month cannot be combined with --from and --to")
        first_day = date.fromisoformat(f"{month}-01")
        last_day = first_day.replace(day=calendar.monthrange(first_day.year, first_day.month)[1])
        return Days(day_number(first_day), day_number(last_day))
    except ValueError as error:
        raise ConfigError(
            f"invalid period: {error}", hint="for example --month 2026-11, or --from 2026-11-01 --to 2026-11-30"
        ) from error
