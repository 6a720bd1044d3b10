"""`peagle down`: stop an endpoint that `peagle up` started."""

import argparse
from typing import Any

from jobs.output import say
from jobs.up import describe, format_cost

HELP = """\
Stop an endpoint that `peagle up` started, as Ctrl-C stops `peagle serve`: running requests get --drain-s to finish.

  peagle down                      the only running endpoint
  peagle down smollm2-135m
  peagle up --list                 all endpoints

Prints the cost of the endpoint. The log and ledger stay in $PEAGLE_HOME/endpoints/NAME.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the endpoint, as listed by `peagle up --list`")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online import background

    endpoint = background.find(args.name)
    if endpoint.process() is None:
        say(f"{endpoint.name} has already stopped")
    else:
        say(f"{endpoint.name} is stopping: waiting for running requests")
        background.end(endpoint)
    result = describe(endpoint)
    cost = format_cost(result["usd"])
    say(f"{endpoint.name} has stopped; its engines cost {cost}; ledger: {endpoint.state / 'ledger'}")
    return 0, result
