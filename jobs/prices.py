"""`peagle prices`: the price table, each row with its date and source."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peagle.economics.offers import Offer
    from peagle.economics.prices import PriceTable

HELP = """\
List the prices that runs and endpoints are charged by: dollars an hour for a machine, each with its date and source.

  peagle prices                  the whole table
  peagle prices H100             machines with that accelerator
  peagle prices p5.48xlarge      one instance type, in every region
  peagle prices --prices own.csv --json -

Renew the table from the public catalogue that it was taken from:

  git clone --depth 1 https://github.com/skypilot-org/skypilot-catalog
  peagle prices --renew skypilot-catalog > prices.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle prices`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="accelerator or instance type (default: all)")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="CSV that adds to or replaces rows of the table")
    parser.add_argument(
        "--renew", type=Path, metavar="CLONE", help="print the table as CSV with the prices of this catalogue's clone"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print the offers."""
    from peagle.economics.prices import PriceTable
    from peagle.tables import aligned

    offers = _chosen(PriceTable.load(args.prices), args.name)
    if args.renew is not None:
        return 0, {"prices": _renew(offers, args.renew)}
    sources = list(dict.fromkeys(offer.source for offer in offers))
    heads = ("instance type", "devices", "where", "on demand $/h", "spot $/h", "reserved $/h", "as of", "source")
    print("\n".join(aligned([heads, *(_row(offer, sources) for offer in offers)])))
    for number, source in enumerate(sources, start=1):
        print(f"[{number}] {source}")
    for offer in offers:
        if offer.doubt_on_demand:
            print(f"! {offer.instance_type} on demand: {offer.doubt_on_demand}")
    return 0, {"prices": [asdict(offer) for offer in offers]}


def _chosen(table: "PriceTable", name: str | None) -> "list[Offer]":
    """The offers of an accelerator or an instance type, or all.

    Raises:
        PriceError: the table has neither.
    """
    from peagle.economics.prices import WAYS_OUT
    from peagle.errors import PriceError, did_you_mean

    if name is None:
        return list(table.offers)
    found = [offer for offer in table.offers if offer.instance_type == name] or table.carrying(name)
    if not found:
        known = {name for offer in table.offers for name in (offer.instance_type, offer.accelerator) if name}
        raise PriceError(f"no price is known for {name!r}", hint=f"{did_you_mean(name, known)}; or {WAYS_OUT}")
    return found


def _renew(offers: "Sequence[Offer]", clone: Path) -> list[dict[str, Any]]:
    """Print these offers with the catalogue's prices; name those that it lacks."""
    from peagle.economics.price_renewal import offers_csv, renewed

    renewal = renewed(offers, clone)
    print(offers_csv(renewal.offers))
    for offer in renewal.missing:
        print(f"! {offer.instance_type} {offer.place}: not in the catalogue; its old price stays", file=sys.stderr)
    return [asdict(offer) for offer in renewal.offers]


def _row(offer: "Offer", sources: "Sequence[str]") -> tuple[str, ...]:
    from peagle.economics.offers import PRICE_COLUMNS

    devices = f"{offer.num_accelerators} x {offer.accelerator}" if offer.accelerator else f"{offer.num_vcpus} vCPUs"
    prices = ("-" if usd is None else f"{usd:,.4f}" for usd in (getattr(offer, name) for name in PRICE_COLUMNS))
    source = f"[{sources.index(offer.source) + 1}]"
    return offer.instance_type, devices, offer.place or "everywhere", *prices, offer.as_of, source
