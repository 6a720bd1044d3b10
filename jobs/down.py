"""`peagle down`: end an endpoint that `peagle up` has started."""

import argparse
from typing import Any

from jobs.output import say
from jobs.up import cost_in_words, described

HELP = """\
Stop an endpoint that `peagle up` started, as Ctrl-C stops `peagle serve`: requests under way get --drain-s.

  peagle down                      the only one that is up
  peagle down smollm2-135m
  peagle up --list                 all there are

It says what the endpoint cost. Its log and its ledger stay, in $PEAGLE_HOME/endpoints/NAME.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `peagle down`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the endpoint, as `peagle up --list` calls it")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """End one."""
    from pipelines.online import background

    endpoint = background.find(args.name)
    if endpoint.process() is None:
        say(f"{endpoint.name} has ended before")
    else:
        say(f"{endpoint.name} is stopping: running requests may finish")
        background.end(endpoint)
    found = described(endpoint)
    cost = cost_in_words(found["usd"])
    say(f"{endpoint.name} has ended; its engines cost {cost}; ledger: {endpoint.state / 'ledger'}")
    return 0, found
