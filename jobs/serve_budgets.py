"""`peagle serve budgets`: budgets of tags and of the whole endpoint."""

import argparse
from pathlib import Path
from typing import Any

from peagle.private import user_path

HELP = """\
Budgets of tags and of the whole endpoint, for all time or for each UTC day, week or month. A running endpoint applies a
change within a second.

  peagle serve budgets set team=search --state runs/serve --budget-usd 500 --every month
  peagle serve budgets set endpoint --state runs/serve --budget-usd 2000 --every month
  peagle serve budgets list --state runs/serve
  peagle serve budgets remove team=search --state runs/serve

A tag's budget covers requests and batches with that tag, and bulk runs that draw on the budget (`peagle generate
--tag team=search --draw-on runs/serve`). The endpoint's budget covers all engine time, including loading and idle time,
and the endpoint's batches. Keys have their own budgets: `peagle serve keys`.
"""


def ledger_of(state: Path) -> Path:
    """Return the ledger folder of an endpoint.

    Raises:
        ConfigError: the ledger does not exist.
    """
    from peagle.errors import ConfigError

    ledger = user_path(state) / "ledger"
    if not ledger.is_dir():
        raise ConfigError(f"--state {state}: the folder has no ledger", hint="use the --state folder of `peagle serve`")
    return ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pipelines.online.config import ServeConfig

    parser.add_argument("action", choices=list(_ACTIONS))
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a tag (KEY=VALUE) or the word endpoint; not used by list"
    )
    state = ServeConfig.model_fields["state"].default
    parser.add_argument(
        "--state", type=Path, default=state, metavar="PATH", help="--state of the endpoint (default: %(default)s)"
    )
    parser.add_argument("--budget-usd", type=float, metavar="X", help="for set: US dollars per period")
    parser.add_argument(
        "--every", choices=["day", "week", "month"], help="for set: the period, in UTC (default: all time)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.shared_budgets import BUDGETS_NAME
    from peagle.errors import ConfigError

    if args.name is None and args.action != "list":
        raise ConfigError(f"{args.action} requires a tag (KEY=VALUE) or the word endpoint")
    if args.action != "set" and (args.budget_usd is not None or args.every is not None):
        raise ConfigError(f"--budget-usd and --every cannot be used with {args.action}")
    return _ACTIONS[args.action](user_path(args.state) / "ledger" / BUDGETS_NAME, args)


def _set(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.shared_budgets import SharedBudget, edit_budgets
    from peagle.errors import ConfigError
    from peagle.files import make_folder
    from peagle.records import validate_record

    if args.budget_usd is None:
        raise ConfigError("set requires --budget-usd")
    values = {"name": args.name, "budget_usd": args.budget_usd, "budget_every": args.every}
    budget = validate_record(SharedBudget, values, where="the budget")
    make_folder(path.parent)
    with edit_budgets(path) as budgets:
        budgets[budget.name] = budget
    print(f"{budget.name}  budget_usd={budget.budget_usd:g}" + (f"  every={args.every}" if args.every else ""))
    return 0, budget.model_dump()


def _remove(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.shared_budgets import edit_budgets
    from peagle.errors import ConfigError, did_you_mean

    with edit_budgets(path) as budgets:
        if args.name not in budgets:
            raise ConfigError(f"there is no budget for {args.name!r}", hint=did_you_mean(args.name, budgets))
        del budgets[args.name]
    print(f"removed the budget for {args.name}")
    return 0, {"name": args.name}


def _list(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.ledger import SessionReader
    from peagle.economics.shared_budgets import read_budgets
    from pipelines.online.gateway.budget_watch import budget_status, refresh_external_spend
    from pipelines.online.totals import Totals

    totals = Totals(ledger_of(args.state))
    totals.catch_up()
    refresh_external_spend(totals, SessionReader(totals.folder))
    budgets = [budget.model_dump() | budget_status(budget, totals.budgets) for budget in read_budgets(path)]
    for budget in budgets:
        fields = (f"{name}={value}" for name, value in budget.items() if name != "name" and value is not None)
        print(budget["name"], *fields, sep="  ")
    return 0, {"budgets": budgets}


_ACTIONS = {"set": _set, "list": _list, "remove": _remove}
