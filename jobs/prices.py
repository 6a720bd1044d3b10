"""`peagle prices`: the price table."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peagle.economics.prices import Offer, PriceTable

HELP = """\
List the prices per machine and hour that are used for runs and endpoints, each with its date and source.

  peagle prices                  the whole table
  peagle prices H100             machines with this accelerator
  peagle prices p5.48xlarge      one instance type, in every region
  peagle prices --prices own.csv --json -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="accelerator or instance type (default: all)")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="CSV that adds to or replaces rows of the table")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.economics.prices import PriceTable
    from peagle.tables import aligned

    offers = _select(PriceTable.load(args.prices), args.name)
    sources = list(dict.fromkeys(offer.source for offer in offers))
    header = ("instance type", "devices", "where", "on demand $/h", "spot $/h", "as of", "source")
    print("\n".join(aligned([header, *(_row(offer, sources) for offer in offers)])))
    for number, source in enumerate(sources, start=1):
        print(f"[{number}] {source}")
    for offer in offers:
        if offer.doubt_on_demand:
            print(f"! {offer.instance_type} on demand: {offer.doubt_on_demand}")
    return 0, {"prices": [asdict(offer) for offer in offers]}


def _select(table: "PriceTable", name: str | None) -> "list[Offer]":
    from peagle.economics.prices import PRICE_HINT
    from peagle.errors import PriceError, did_you_mean

    if name is None:
        return list(table.offers)
    offers = [offer for offer in table.offers if offer.instance_type == name] or table.offers_with(name)
    if not offers:
        names = {name for offer in table.offers for name in (offer.instance_type, offer.accelerator) if name}
        raise PriceError(f"no price for {name!r}", hint=f"{did_you_mean(name, names)}; or {PRICE_HINT}")
    return offers


def _row(offer: "Offer", sources: "Sequence[str]") -> tuple[str, ...]:
    devices = f"{offer.num_accelerators} x {offer.accelerator}" if offer.accelerator else f"{offer.num_vcpus} vCPUs"
    prices = ["-" if usd is None else f"{usd:,.4f}" for usd in (offer.usd_per_hour_on_demand, offer.usd_per_hour_spot)]
    source = f"[{sources.index(offer.source) + 1}]"
    return offer.instance_type, devices, offer.place or "everywhere", *prices, offer.as_of, source
