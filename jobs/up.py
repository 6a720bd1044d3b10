"""`peagle up`: an endpoint in the background, and those there are."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from jobs import flags, serve
from jobs.output import say
from peagle.economics.report.figures import format_duration, format_usd
from peagle.ports import free_port, is_free
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

It is `peagle serve` with the same keys; `--name` tells two endpoints of one model apart. Where 8000 is taken and no
port is named, it takes a free one. Its log, its ledger and its configuration are in $PEAGLE_HOME/endpoints/NAME.
"""
EPILOG = serve.EPILOG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle up`: those of `peagle serve`."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="catalog name, folder, or Hugging Face id"
    )
    parser.add_argument("--list", action="store_true", help="list the endpoints: state, address, cost, log")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Start one, or list them."""
    from pipelines.online import background

    if args.list:
        return 0, {"endpoints": _print_list(background.endpoints())}
    config = flags.load(ServeConfig, args)
    if args.dry_run:
        return serve.dry_run(config)
    endpoint = background.start(config, port=_port(config))
    say(f"{endpoint.name} starts; its log is {endpoint.log}")
    try:
        background.wait_until_up(endpoint, say)
    except BaseException:  # Ctrl-C too: what nobody waits for would go on and cost money
        background.end(endpoint)
        raise
    say(f"{endpoint.name} is up at {endpoint.url}; `peagle down {endpoint.name}` ends it")
    return 0, described(endpoint)


def described(endpoint: "Endpoint") -> dict[str, Any]:
    """An endpoint as data."""
    return {
        "name": endpoint.name,
        "status": endpoint.status(),
        "url": endpoint.url,
        "started_at": endpoint.started_at,
        "usd": endpoint.usd(),
        "log": str(endpoint.log),
        "state": str(endpoint.state),
    }


def cost_in_words(usd: float | None) -> str:
    """Dollars, which are not known before an endpoint was up."""
    return "unknown" if usd is None else format_usd(usd)


def _print_list(endpoints: "list[Endpoint]") -> list[dict[str, Any]]:
    found = [described(one) for one in endpoints]
    now = time.time()
    rows = [
        [
            one["name"],
            one["status"],
            one["url"],
            format_duration(now - one["started_at"]),
            cost_in_words(one["usd"]),
            one["log"],
        ]
        for one in found
    ]
    print("\n".join(aligned([["endpoint", "state", "address", "started ago", "cost so far", "log"], *rows])))
    return found


def _port(config: ServeConfig) -> int:
    """The port that is named, else the usual one, else one that is free."""
    if "port" in config.model_fields_set or is_free(config.port, config.host):
        return config.port
    return free_port(config.host)
