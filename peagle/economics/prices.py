"""The price of an instance type: from the packaged table, from a user's table, or stated by the user.

A price is shared by the devices of the instance: its accelerators, or its vCPUs if it has none. If several instance
types or prices match, an error lists them. A spot price without a region is that of the cheapest region.

The packaged prices.csv comes from a public catalogue of cloud prices: `source` names the catalogue's file and commit,
`as_of` the day of the commit. Spot prices are medians over the zones of a region.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self, cast, get_args

from peagle.errors import PriceError, did_you_mean
from peagle.tables import aligned

MARKETS = ("on_demand", "spot")  # in price tables; `Market` also includes markets that occur only in recorded prices
PRICE_COLUMNS = tuple(f"usd_per_hour_{market}" for market in MARKETS)
COLUMNS = (
    *("provider", "region", "instance_type", "accelerator", "accelerator_count", "vcpus", "memory_gib"),
    *PRICE_COLUMNS,
    *("as_of", "source", "doubt_on_demand"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An instance type in one region, priced in USD per hour. A price is None if the market is not offered.

    `doubt_on_demand` says why the on-demand price might be wrong; it is empty if nothing suggests it.
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
        """Provider and region, such as "aws us-east-1"."""
        return f"{self.provider} {self.region}".strip()

    def usd_per_hour(self, market: str) -> float | None:
        """Return the price in a market, or None."""
        # Catalogues repeat the on-demand price if they have no spot price.
        if market == "spot" and self.usd_per_hour_spot == self.usd_per_hour_on_demand:
            return None
        return cast("float | None", getattr(self, f"usd_per_hour_{market}"))

    def replaces(self, other: "Offer") -> bool:
        """Return whether this row of a user's table replaces `other`. An empty provider or region matches any."""
        return (
            self.instance_type == other.instance_type
            and self.provider in ("", other.provider)
            and self.region in ("", other.region)
        )


def read_offers(path: Path) -> list[Offer]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, list(reader.fieldnames or ()))
            offers = [_parse_offer(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PriceError(f"cannot read the price table {path}: {error}") from error
    identities: set[tuple[str, str, str]] = set()
    for offer in offers:
        identity = (offer.provider, offer.region, offer.instance_type)
        if identity in identities:
            raise PriceError(f"{path}: {offer.instance_type} has two prices for {offer.place or 'all regions'}")
        identities.add(identity)
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
            f"{path}: a price table requires the column instance_type and one of {', '.join(PRICE_COLUMNS)}",
            hint=f"columns: {','.join(COLUMNS)}",
        )


def _parse_offer(path: Path, line: int, row: Mapping[str | None, str | None]) -> Offer:
    if None in row or None in row.values():
        raise PriceError(f"{path}, line {line}: the number of fields differs from the header")
    values = {str(name): (value or "").strip() for name, value in row.items()}
    try:
        return Offer(
            instance_type=values["instance_type"],
            provider=values.get("provider", ""),
            region=values.get("region", ""),
            accelerator=values.get("accelerator") or None,
            num_accelerators=int(values.get("accelerator_count") or 0),
            num_vcpus=int(values.get("vcpus") or 0),
            memory_gib=float(values["memory_gib"]) if values.get("memory_gib") else None,
            **{name: float(values[name]) for name in PRICE_COLUMNS if values.get(name)},
            as_of=values.get("as_of") or "undated",
            source=values.get("source") or path.name,
            doubt_on_demand=values.get("doubt_on_demand", ""),
        )
    except ValueError as error:
        raise PriceError(f"{path}, line {line}: {error}") from error


# The same accelerators have different names in catalogues ("A100-80GB", "RTXPRO6000"), in drivers
# ("NVIDIA A100-SXM4-80GB", "NVIDIA RTX PRO 6000 Blackwell") and in Ray ("A100-80G").
_FORM_FACTOR = re.compile(r"SXM\d*")  # drivers put it between model and memory
_MEMORY = re.compile(r"(\d+)GB?")


def same_accelerator(name: str | None, device_name: str) -> bool:
    """Return whether a price table and a driver name the same accelerator.

    The name must be a sequence of whole words of the device name, so "L4" is not "NVIDIA L40S".

    >>> [same_accelerator(name, "NVIDIA A100-SXM4-80GB") for name in ("A100-80GB", "A100", None)]
    [True, False, False]
    """
    if name is None:
        return False
    words = _words(device_name)
    if _FORM_FACTOR.search(name.upper()) and not {"PCIE", "NVL"}.isdisjoint(words):
        return False  # an SXM device is not the PCIe or NVL variant
    compact_name = "".join(_words(name))
    sequences = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    memory = [word for word in words if _MEMORY.fullmatch(word)]
    # "A100" without memory is the variant that was released first.
    is_larger_a100 = compact_name == "A100" and bool(memory) and "40GB" not in memory
    return compact_name in sequences and not is_larger_a100


def _words(name: str) -> list[str]:
    words = [word for word in re.findall(r"[A-Z0-9]+", name.upper()) if not _FORM_FACTOR.fullmatch(word)]
    return [_MEMORY.sub(r"\1GB", word) if _MEMORY.fullmatch(word) else word for word in words]


Market = Literal["on_demand", "spot", "reserved", "fixed"]  # "reserved" only in records of earlier versions
Device = Literal["accelerator", "vcpu"]
Basis = Literal["stated", "detected", "assumed"]

DEFAULT_CPU_INSTANCE = "c7a.large"
PRICE_HINT = "set --usd-per-hour, or use a price table with --prices FILE.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The hourly price of an instance, and the number of devices that share it.

    Attributes:
        market: "fixed" if the user stated the price.
        accelerator: name in the price table; None for CPU instances.
        doubt: why the price might be wrong; empty if nothing suggests it.
        basis: "stated" if the user set the price or the instance type; otherwise whether the type was detected or
            assumed; None for a row of the table.
        on_demand_usd_per_hour: on-demand price of a spot instance; None if unknown.
    """

    instance_type: str
    provider: str = ""
    region: str = ""
    market: Market
    usd_per_hour: float
    device: Device
    num_devices: int
    accelerator: str | None = None
    source: str
    as_of: str
    doubt: str = ""
    basis: Basis | None = None
    on_demand_usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        for value, literal in ((self.market, Market), (self.device, Device), (self.basis or "stated", Basis)):
            if value not in get_args(literal):
                raise PriceError(f"{value!r} is not one of {', '.join(get_args(literal))}")
        if not 0 < self.usd_per_hour < float("inf"):
            raise PriceError(
                f"the price must be positive, got {self.usd_per_hour} USD per hour",
                hint="for your own hardware, divide its cost by its hours of use",
            )
        if self.num_devices < 1:
            raise PriceError(f"a price requires at least one device, got {self.num_devices}")

    @classmethod
    def fixed(cls, *, usd_per_hour: float, device: Device, num_devices: int) -> Self:
        """Return a price that the user stated for the whole machine with `--usd-per-hour`."""
        return cls(
            instance_type="custom",
            market="fixed",
            usd_per_hour=usd_per_hour,
            device=device,
            num_devices=num_devices,
            source="stated by the user",
            as_of="undated",
            basis="stated",
        )

    @property
    def usd_per_device_s(self) -> float:
        return self.usd_per_hour / self.num_devices / 3600

    @property
    def on_demand_usd_per_device_s(self) -> float:
        """The on-demand price per device-second of a spot instance; 0 if unknown."""
        return (self.on_demand_usd_per_hour or 0.0) / self.num_devices / 3600

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        names = {field.name for field in fields(cls)}
        data = {"basis": None, "on_demand_usd_per_hour": None, **data}  # missing in records of earlier versions
        if set(data) != names:
            raise PriceError(f"a recorded price must have exactly the keys {sorted(names)}, got {sorted(data)}")
        try:
            return cls(**data)  # type: ignore[arg-type]  # checked by __post_init__
        except TypeError as error:
            raise PriceError(f"not a price: {dict(data)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    offers: tuple[Offer, ...]

    @classmethod
    def load(cls, override: Path | None = None) -> Self:
        """Load the packaged table, with the rows of the user's table `override` added.

        Each added row replaces the packaged rows that it matches (`Offer.replaces`).
        """
        added = read_offers(override) if override else []
        packaged = read_offers(Path(str(files("peagle.economics") / "prices.csv")))
        remaining = [offer for offer in packaged if not any(row.replaces(offer) for row in added)]
        return cls(offers=tuple(sorted([*added, *remaining], key=lambda offer: (offer.instance_type, offer.place))))

    def price(
        self,
        instance_type: str,
        *,
        market: str = "on_demand",
        provider: str | None = None,
        region: str | None = None,
    ) -> Price:
        """Return the price of an instance type.

        If the price depends on the region and no region is given, the spot price is that of the cheapest region, with
        the range of prices in `doubt`. In the same case, an on-demand price raises PriceError.
        """
        if market not in MARKETS:
            raise PriceError(f"unknown market {market!r}", hint=did_you_mean(market, MARKETS))
        offers = self._matching_offers(instance_type, provider, region)
        priced = [(offer, usd) for offer in offers if (usd := offer.usd_per_hour(market)) is not None]
        if not priced:
            raise PriceError(
                f"no {market.replace('_', '-')} price for {instance_type}; known prices: {_list_prices(offers)}",
                hint=f"use another --market, {PRICE_HINT}",
            )
        lowest, highest = min(usd for _, usd in priced), max(usd for _, usd in priced)
        if math.isclose(lowest, highest, rel_tol=1e-4):  # equal up to rounding, such as 21.957642 and 21.95764
            return _price_of_offer(*priced[0], market)
        if market != "spot":
            by_place = ", ".join(f"{offer.place} ${usd:g}" for offer, usd in priced)
            raise PriceError(
                f"the {market.replace('_', '-')} price of {instance_type} depends on the region: {by_place} per hour",
                hint=f"set --region (and --provider), {PRICE_HINT}",
            )
        return replace(
            _price_of_offer(*min(priced, key=lambda pair: pair[1]), market),
            doubt=f"spot costs ${lowest:g} to ${highest:g} per hour, depending on the region; this is the cheapest",
        )

    def offer(self, instance_type: str | None) -> Offer | None:
        """Return an instance type's offer in some region, or None. Its devices are the same in every region."""
        return next((offer for offer in self.offers if offer.instance_type == instance_type), None)

    def has_accelerator(self, instance_type: str, accelerator: str | None) -> bool:
        """Return whether an instance type has this accelerator; None means no accelerator."""
        return any(offer.instance_type == instance_type for offer in self.offers_with(accelerator))

    def offers_with(self, accelerator: str | None) -> list[Offer]:
        if accelerator is None:
            return [offer for offer in self.offers if not offer.num_accelerators]
        return [offer for offer in self.offers if same_accelerator(offer.accelerator, accelerator)]

    def _matching_offers(self, instance_type: str, provider: str | None, region: str | None) -> list[Offer]:
        in_all_regions = [offer for offer in self.offers if offer.instance_type == instance_type]
        if not in_all_regions:
            suggestion = did_you_mean(instance_type, {offer.instance_type for offer in self.offers})
            message = f"no price for the instance type {instance_type!r}"
            raise PriceError(message, hint=f"{suggestion}; or {PRICE_HINT}")
        matching = [
            offer for offer in in_all_regions if provider in (None, offer.provider) and region in (None, offer.region)
        ]
        if not matching:
            place = " ".join(part for part in (provider, region) if part)
            message = f"no price for {instance_type} at {place}; known prices: {_list_prices(in_all_regions)}"
            raise PriceError(message, hint=PRICE_HINT)
        return matching


def default_instance(
    accelerator: str | None, table: PriceTable, *, market: str = "on_demand", machine_names: Sequence[str] = ()
) -> str:
    """Return the instance type to assume: c7a.large without an accelerator, else the only type that has it."""
    if accelerator is None:
        return DEFAULT_CPU_INSTANCE
    offers = table.offers_with(accelerator)
    names = {offer.instance_type for offer in offers}
    if len(names) == 1:
        return names.pop()
    reason = f"{len(names)} instance types have it" if names else "no instance type in the table has it"
    unknown = f"; the table has no {', '.join(machine_names)}, the type of this machine" if machine_names else ""
    raise PriceError(
        f"no price for {accelerator!r} without an instance type; {reason}{unknown}",
        hint="\n    ".join([f"set --instance-type, {PRICE_HINT}", *price_lines(offers, market)]),
    )


def price_lines(offers: Iterable[Offer], market: str) -> list[str]:
    """Return a line per instance type, such as "p5.48xlarge  8 x H100  $55.04/h on demand  aws"."""
    by_type: defaultdict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        by_type[offer.instance_type].append(offer)
    return aligned(
        [
            (name, f"{rows[0].num_accelerators} x {rows[0].accelerator}", _price_range(rows, market), rows[0].provider)
            for name, rows in sorted(by_type.items())
        ]
    )


def _price_range(offers: list[Offer], market: str) -> str:
    for shown_market in (market, *MARKETS):
        prices = [usd for offer in offers if (usd := offer.usd_per_hour(shown_market)) is not None]
        if prices:
            low, high = f"${min(prices):,.2f}", f"${max(prices):,.2f}"
            return f"{low if low == high else f'{low} to {high}'}/h {shown_market.replace('_', ' ')}"
    raise AssertionError("an offer without a price")


def _price_of_offer(offer: Offer, usd_per_hour: float, market: str) -> Price:
    return Price(
        instance_type=offer.instance_type,
        provider=offer.provider,
        region=offer.region,
        market=cast("Market", market),
        usd_per_hour=usd_per_hour,
        device="accelerator" if offer.num_accelerators else "vcpu",
        num_devices=offer.num_accelerators or offer.num_vcpus,
        accelerator=offer.accelerator,
        source=offer.source,
        as_of=offer.as_of,
        doubt=offer.doubt_on_demand if market == "on_demand" else "",
        on_demand_usd_per_hour=offer.usd_per_hour_on_demand if market == "spot" and not offer.doubt_on_demand else None,
    )


def _list_prices(offers: list[Offer]) -> str:
    return ", ".join(
        f"{offer.place} {market.replace('_', '-')} ${usd:g}".strip()
        for offer in offers
        for market in MARKETS
        if (usd := offer.usd_per_hour(market)) is not None
    )
