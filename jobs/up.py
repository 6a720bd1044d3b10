"""`peagle up`: start an endpoint in the background, or list endpoints."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from jobs import flags, serve
from jobs.output import say
from peagle.economics.report.figures import format_duration, format_usd
from peagle.tables import aligned
from pipelines.online.config import ServeConfig

if TYPE_CHECKING:
    from pipelines.online.background import Endpoint

HELP = """\
Start an endpoint in the background, here or on the cluster of RAY_ADDRESS, and return when it is up.

  peagle up smollm2-135m
  peagle up qwen3-coder-30b-a3b-instruct --idle-timeout 30m --keys keys.json --host 0.0.0.0
  peagle up --list
  peagle down

Runs `peagle serve` with the same options; `--name` distinguishes two endpoints of one model. If port 8000 is in use and
--port is not given, a free port is used. The log, ledger and configuration are in $PEAGLE_HOME/endpoints/NAME.
"""
EPILOG = serve.EPILOG
COMMON = ("list", *serve.COMMON)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="catalog name, folder, or Hugging Face id"
    )
    parser.add_argument("--list", action="store_true", help="list the endpoints: state, address, cost, log")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online import background

    if args.list:
        endpoints = [describe(endpoint) for endpoint in background.endpoints()]
        _print_list(endpoints)
        return 0, {"endpoints": endpoints}
    config = flags.load(ServeConfig, args)
    if args.dry_run:
        return serve.dry_run(config)
    endpoint = background.start_and_wait(config, say)
    say(f"{endpoint.name} is up at {endpoint.url}; `peagle down {endpoint.name}` stops it")
    return 0, describe(endpoint)


def describe(endpoint: "Endpoint") -> dict[str, Any]:
    return {
        "name": endpoint.name,
        "status": endpoint.status(),
        "url": endpoint.url,
        "started_at": endpoint.started_at,
        "usd": endpoint.usd(),
        "log": str(endpoint.log),
        "state": str(endpoint.state),
    }


def format_cost(usd: float | None) -> str:
    """Format dollars; None for an endpoint that was never up."""
    return "unknown" if usd is None else format_usd(usd)


def _print_list(endpoints: list[dict[str, Any]]) -> None:
    rows = [("endpoint", "state", "address", "age", "cost so far", "log")]
    for endpoint in endpoints:
        age = format_duration(time.time() - endpoint["started_at"])
        cost = format_cost(endpoint["usd"])
        rows.append((endpoint["name"], endpoint["status"], endpoint["url"], age, cost, endpoint["log"]))
    print("\n".join(aligned(rows)))
