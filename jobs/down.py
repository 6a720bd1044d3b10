"""`peagle down`: stop an endpoint that `peagle up` started."""

import argparse
from typing import Any

from jobs.output import say
from jobs.up import describe, format_cost

HELP = """\
Stop an endpoint that `peagle up` started, as Ctrl-C stops `peagle serve`: requests under way get --drain-s.

  peagle down                      the only one that is up
  peagle down smollm2-135m
  peagle up --list                 all endpoints

It says what the endpoint cost. Its log and its ledger stay, in $PEAGLE_HOME/endpoints/NAME.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the endpoint, as `peagle up --list` calls it")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online import background

    endpoint = background.find(args.name)
    if endpoint.process() is None:
        say(f"{endpoint.name} has already stopped")
    else:
        say(f"{endpoint.name} is stopping: running requests may finish")
        background.end(endpoint)
    result = describe(endpoint)
    cost = format_cost(result["usd"])
    say(f"{endpoint.name} has stopped; its engines cost {cost}; ledger: {endpoint.state / 'ledger'}")
    return 0, result
