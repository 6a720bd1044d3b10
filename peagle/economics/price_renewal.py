"""Renewal of the price table from the catalogue that it was taken from.

    catalogue's clone + offers -> the same offers with its present prices, and those that it no longer has

It knows the catalogue's files: `catalogs/VERSION/PROVIDER/vms.csv`, a line for each zone. No offer is added or dropped:
which machines the table has is a choice that no catalogue makes. What is not its own stays as it is.
"""

import csv
import io
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from peagle.economics.offers import COLUMNS, Offer
from peagle.errors import ConfigError

CATALOGUE = "skypilot-org/skypilot-catalog"
_PRICES = ("Price", "SpotPrice")
_COLUMNS = {"InstanceType", "Region", *_PRICES}
_COMMIT_LETTERS = 12
_ATTRIBUTES = {"accelerator_count": "num_accelerators", "vcpus": "num_vcpus"}  # where a column is called otherwise
_Prices = Mapping[tuple[str, str], tuple[float | None, float | None]]
"""On demand and spot, by instance type and region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Renewed offers.

    Attributes:
        offers: all of them, in their order.
        missing: those that the catalogue does not have any more; they are as they were.
    """

    offers: tuple[Offer, ...]
    missing: tuple[Offer, ...]


def renewed(offers: Iterable[Offer], clone: Path) -> Renewal:
    """The offers with the catalogue's present prices, dated by its last commit.

    On demand and spot are the medians over a region's zones. A doubt stays.

    Raises:
        ConfigError: the folder is no clone of the catalogue, or a file is not as expected.
    """
    catalogue, found, missing = _Catalogue(clone), [], []
    for offer in offers:
        is_theirs = offer.source.startswith(f"{CATALOGUE} ")
        new = catalogue.renewed(offer) if is_theirs else offer
        found.append(new or offer)
        if new is None:
            missing.append(offer)
    return Renewal(offers=tuple(found), missing=tuple(missing))


class _Catalogue:
    """A clone of the catalogue."""

    def __init__(self, clone: Path) -> None:
        self._clone = clone
        self._commit, self._date = _git(clone, "rev-parse", "HEAD"), _git(clone, "log", "-1", "--format=%cs")
        self._read: dict[str, tuple[str, _Prices]] = {}  # by provider: the file's name, and what is in it

    def renewed(self, offer: Offer) -> Offer | None:
        """The offer with its present prices; None where it is not sold there any more."""
        if offer.provider not in self._read:
            file = _newest(self._clone, offer.provider)
            self._read[offer.provider] = (str(file.relative_to(self._clone)), _prices(file))
        name, prices = self._read[offer.provider]
        on_demand, spot = prices.get((offer.instance_type, offer.region), (None, None))
        if on_demand is None and spot is None:
            return None
        return replace(
            offer,
            usd_per_hour_on_demand=on_demand,
            usd_per_hour_spot=spot,
            as_of=self._date,
            source=f"{CATALOGUE} {name}@{self._commit[:_COMMIT_LETTERS]}",
        )


def offers_csv(offers: Iterable[Offer]) -> str:
    """The offers as a price table, which `--prices` reads."""
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
        done = subprocess.run(["git", "-C", clone, *arguments], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{clone} is no clone of the catalogue: {error}",
            hint=f"git clone --depth 1 https://github.com/{CATALOGUE}",
        ) from error
    return done.stdout.strip()


def _newest(clone: Path, provider: str) -> Path:
    """The provider's file of the catalogue's newest version that has one."""
    files = clone.glob(f"catalogs/v*/{provider}/vms.csv")
    by_version = {int(version[1]): file for file in files if (version := re.search(r"/v(\d+)/", file.as_posix()))}
    if not by_version:
        raise ConfigError(f"{clone} has no catalogs/v*/{provider}/vms.csv")
    return by_version[max(by_version)]


def _prices(file: Path) -> _Prices:
    zones: defaultdict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if lacking := _COLUMNS - set(reader.fieldnames or ()):
            raise ConfigError(f"{file} has no column {min(lacking)}")
        for line in reader:
            for prices, name in zip(zones[line["InstanceType"], line["Region"]], _PRICES, strict=True):
                if line[name]:
                    prices.append(_number(file, reader.line_num, line[name]))
    return {place: (_median(on_demand), _median(spot)) for place, (on_demand, spot) in zones.items()}


def _number(file: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{file}, line {line}: {text!r} is no price") from error


def _median(prices: list[float]) -> float | None:
    return median(prices) if prices else None
