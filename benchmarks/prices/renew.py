"""Renew the price table from the public catalogue of cloud prices that it came from.

    git clone --depth 1 https://github.com/skypilot-org/skypilot-catalog
    python benchmarks/prices/renew.py skypilot-catalog > prices.csv

The result is for `--prices`, or for peagle/economics/prices.csv. Rows keep their order; none are added or dropped. Rows
that the catalogue no longer has keep their old price and are listed on stderr.
"""

import argparse
import csv
import io
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from peagle.economics.prices import COLUMNS, Offer, PriceTable

CATALOGUE = "skypilot-org/skypilot-catalog"
_PRICE_COLUMNS = ("Price", "SpotPrice")
_ATTRIBUTES = {"accelerator_count": "num_accelerators", "vcpus": "num_vcpus"}  # columns with another name in `Offer`
_Prices = Mapping[tuple[str, str], tuple[float | None, float | None]]
"""On-demand and spot price by instance type and region."""


def main() -> None:
    """Print the renewed table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, metavar="CLONE", help="clone of the catalogue")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="CSV that adds to or replaces rows of the table")
    args = parser.parse_args()
    offers, missing = renew(PriceTable.load(args.prices).offers, args.clone)
    sys.stdout.write(offers_csv(offers) + "\n")
    for offer in missing:
        sys.stderr.write(f"! {offer.instance_type} {offer.place}: not in the catalogue; its old price stays\n")


def renew(offers: Iterable[Offer], clone: Path) -> tuple[list[Offer], list[Offer]]:
    """Return the offers with current prices, and those that the catalogue no longer has.

    Prices are medians over the zones of a region, dated by the catalogue's last commit.
    """
    commit, date = _git(clone, "rev-parse", "HEAD"), _git(clone, "log", "-1", "--format=%cs")
    files: dict[str, Path] = {}
    prices: dict[str, _Prices] = {}
    renewed, missing = [], []
    for offer in offers:
        if not offer.source.startswith(f"{CATALOGUE} "):
            renewed.append(offer)
            continue
        if offer.provider not in files:
            files[offer.provider] = _newest_file(clone, offer.provider)
            prices[offer.provider] = _read_prices(files[offer.provider])
        on_demand, spot = prices[offer.provider].get((offer.instance_type, offer.region), (None, None))
        if on_demand is None and spot is None:
            renewed.append(offer)
            missing.append(offer)
            continue
        source = f"{CATALOGUE} {files[offer.provider].relative_to(clone)}@{commit[:12]}"
        renewed.append(
            replace(offer, usd_per_hour_on_demand=on_demand, usd_per_hour_spot=spot, as_of=date, source=source)
        )
    return renewed, missing


def offers_csv(offers: Iterable[Offer]) -> str:
    """Return the offers in the format of `--prices`."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(getattr(offer, _ATTRIBUTES.get(name, name))) for name in COLUMNS] for offer in offers)
    return sink.getvalue().rstrip("\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _git(clone: Path, *arguments: str) -> str:
    try:
        completed = subprocess.run(
            ["git", "-C", clone, *arguments], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{clone} is not a clone of https://github.com/{CATALOGUE}: {error}") from error
    return completed.stdout.strip()


def _newest_file(clone: Path, provider: str) -> Path:
    files = clone.glob(f"catalogs/v*/{provider}/vms.csv")
    by_version = {int(version[1]): file for file in files if (version := re.search(r"/v(\d+)/", file.as_posix()))}
    if not by_version:
        raise SystemExit(f"{clone} has no catalogs/v*/{provider}/vms.csv")
    return by_version[max(by_version)]


def _read_prices(file: Path) -> _Prices:
    zones: defaultdict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if missing := {"InstanceType", "Region", *_PRICE_COLUMNS} - set(reader.fieldnames or ()):
            raise SystemExit(f"{file} has no column {min(missing)}")
        for line in reader:
            for prices, name in zip(zones[line["InstanceType"], line["Region"]], _PRICE_COLUMNS, strict=True):
                if line[name]:
                    prices.append(float(line[name]))
    return {place: (_median(on_demand), _median(spot)) for place, (on_demand, spot) in zones.items()}


def _median(prices: list[float]) -> float | None:
    return median(prices) if prices else None


if __name__ == "__main__":
    main()
