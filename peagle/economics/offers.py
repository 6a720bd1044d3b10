"""Rows of a price table: an instance type in a region, read from CSV.

The packaged prices.csv comes from a public catalogue of cloud prices. `source` names the catalogue file and commit,
`as_of` the day of that commit. Spot prices are medians over the zones of a region.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from peagle.errors import PriceError, did_you_mean

COLUMNS = (
    "provider",
    "region",
    "instance_type",
    "accelerator",
    "accelerator_count",
    "vcpus",
    "memory_gib",
    "usd_per_hour_on_demand",
    "usd_per_hour_spot",
    "as_of",
    "source",
    "doubt_on_demand",
)
MARKETS = ("on_demand", "spot")
PRICE_COLUMNS = tuple(f"usd_per_hour_{market}" for market in MARKETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An instance type in one region, priced in USD per hour. A price is None if it is not sold that way.

    Attributes:
        doubt_on_demand: why the on-demand price may be wrong; empty if nothing suggests it.
    """

    instance_type: str
    provider: str = ""
    region: str = ""
    accelerator: str | None = None
    num_accelerators: int = 0
    num_vcpus: int = 0
    memory_gib: float | None = None
    usd_per_hour_on_demand: float | None = None
    usd_per_hour_spot: float | None = None
    as_of: str = ""
    source: str = ""
    doubt_on_demand: str = ""

    def __post_init__(self) -> None:
        if not self.instance_type:
            raise ValueError("instance_type is empty")
        if self.num_accelerators < 0 or self.num_vcpus < 0 or not (self.num_accelerators or self.num_vcpus):
            raise ValueError("accelerator_count or vcpus must be at least 1")
        prices = {name: usd for name in PRICE_COLUMNS if (usd := getattr(self, name)) is not None}
        for name, usd in prices.items():
            if not 0 < usd < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {usd}")
        if not prices:
            raise ValueError(f"{' or '.join(PRICE_COLUMNS)} must contain a price")

    @property
    def place(self) -> str:
        """Provider and region, as "aws us-east-1"."""
        return f"{self.provider} {self.region}".strip()

    def usd_per_hour(self, market: str) -> float | None:
        """Return the price in a market, or None.

        Catalogues repeat the on-demand price if they have no spot price, so an equal spot price is None.
        """
        if market == "spot" and self.usd_per_hour_spot == self.usd_per_hour_on_demand:
            return None
        usd: float | None = getattr(self, f"usd_per_hour_{market}")
        return usd

    def replaces(self, other: "Offer") -> bool:
        """Return whether this row of a user's table replaces `other`. An empty region means everywhere."""
        return (
            self.instance_type == other.instance_type
            and self.provider in ("", other.provider)
            and self.region in ("", other.region)
        )


def packaged_offers() -> list[Offer]:
    return read_offers(Path(str(files("peagle.economics") / "prices.csv")))


def read_offers(path: Path) -> list[Offer]:
    """Read a price table. It needs instance_type, a price and a number of devices."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, list(reader.fieldnames or ()))
            offers = [_offer(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PriceError(f"cannot read the price table {path}: {error}") from error
    _check_unique(path, offers)
    return offers


def _check_columns(path: Path, names: list[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS)
            if name == "usd_per_hour_reserved":  # a column of earlier versions
                hint = "reserved prices were removed: write the price into usd_per_hour_on_demand"
            raise PriceError(f"{path}: unknown column {name!r}", hint=hint)
    if "instance_type" not in names or not set(PRICE_COLUMNS) & set(names):
        raise PriceError(
            f"{path}: a price table needs the column instance_type and one of {', '.join(PRICE_COLUMNS)}",
            hint=f"columns: {','.join(COLUMNS)}",
        )


def _offer(path: Path, line: int, row: Mapping[str | None, str | None]) -> Offer:
    if None in row or None in row.values():
        raise PriceError(f"{path}, line {line}: the number of fields differs from the header")
    cells = {str(name): (value or "").strip() for name, value in row.items()}
    try:
        return Offer(
            instance_type=cells["instance_type"],
            provider=cells.get("provider", ""),
            region=cells.get("region", ""),
            accelerator=cells.get("accelerator") or None,
            num_accelerators=int(cells.get("accelerator_count") or 0),
            num_vcpus=int(cells.get("vcpus") or 0),
            memory_gib=_number(cells.get("memory_gib")),
            **{name: _number(cells.get(name)) for name in PRICE_COLUMNS},
            as_of=cells.get("as_of") or "undated",
            source=cells.get("source") or path.name,
            doubt_on_demand=cells.get("doubt_on_demand", ""),
        )
    except ValueError as error:
        raise PriceError(f"{path}, line {line}: {error}") from error


def _number(cell: str | None) -> float | None:
    return float(cell) if cell else None


def _check_unique(path: Path, offers: list[Offer]) -> None:
    seen: set[tuple[str, str, str]] = set()
    for offer in offers:
        key = (offer.provider, offer.region, offer.instance_type)
        if key in seen:
            raise PriceError(f"{path}: {offer.instance_type} has two prices for {offer.place or 'everywhere'}")
        seen.add(key)


# The same accelerators have different names in catalogues ("A100-80GB", "RTXPRO6000"), in drivers
# ("NVIDIA A100-SXM4-80GB", "NVIDIA RTX PRO 6000 Blackwell") and in Ray ("A100-80G").
_FORM = re.compile(r"SXM\d*")  # drivers put the form factor between model and memory
_OTHER_FORMS = {"PCIE", "NVL"}
_MEMORY = re.compile(r"(\d+)GB?")
# A name without memory means the variant that was released first.
_PLAIN_MEMORY = {"A100": "40GB"}


def is_accelerator(name: str | None, device_name: str) -> bool:
    """Return whether a price table and a driver name the same accelerator.

    The name must be a sequence of whole words of the device name, so "L4" is not "NVIDIA L40S".

    >>> [is_accelerator(name, "NVIDIA A100-SXM4-80GB") for name in ("A100-80GB", "A100", None)]
    [True, False, False]
    """
    if name is None:
        return False
    words = _words(device_name)
    if _FORM.search(name.upper()) and not _OTHER_FORMS.isdisjoint(words):
        return False
    spelled = "".join(_words(name))
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    plain, memory = _PLAIN_MEMORY.get(spelled), [word for word in words if _MEMORY.fullmatch(word)]
    return spelled in runs and (plain is None or not memory or plain in memory)


def _words(name: str) -> list[str]:
    words = [word for word in re.findall(r"[A-Z0-9]+", name.upper()) if not _FORM.fullmatch(word)]
    return [_MEMORY.sub(r"\1GB", word) if _MEMORY.fullmatch(word) else word for word in words]
