"""One price for one kind of hardware: packaged, from a user's table, or stated.

It knows offers and how to choose among them. Of several instance types it never takes one: the error lists them with
their dollars, and the ways to state a price. Spot has one rule: where no region is named, the cheapest one counts.

A price is shared by devices. With accelerators on the instance the device is one of them; without, one vCPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, Self, cast, get_args

from peagle.economics.offers import MARKETS, Offer, is_accelerator, packaged_offers, read_offers
from peagle.errors import PriceError, did_you_mean
from peagle.tables import aligned

Market = Literal["on_demand", "spot", "reserved", "fixed"]
Device = Literal["accelerator", "vcpu"]
Basis = Literal["stated", "detected", "assumed"]

DEFAULT_CPU_INSTANCE = "c7a.large"
WAYS_OUT = "state a price with --usd-per-hour, or give a table with --prices FILE.csv"
# Prices this close are one price written with different rounding (p4d.24xlarge: 21.957642 and 21.95764).
_SAME_PRICE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The hourly cost of an instance, and the number of devices that share it.

    Args:
        market: "on_demand", "spot", "reserved", or "fixed" when the user stated the price.
        accelerator: its name as the table has it; None on CPU instances.
        source: where the number comes from.
        as_of: when it was true, as exactly as is known.
        doubt: why the number may be wrong; empty when nothing speaks against it.
        basis: how it is known to be this machine's: the user stated it or its instance type, the machine or its cluster
            says which it is, or it is an assumption. None where it is nobody's: a row of the table.
        on_demand_usd_per_hour: of a spot instance, its price on demand; None where unknown field.

    Raises:
        PriceError: the price is not positive, or there is no device to share it.
    """

    instance_type: str
    provider: str
    region: str
    market: Market
    usd_per_hour: float
    device: Device
    num_devices: int
    accelerator: str | None
    source: str
    as_of: str
    doubt: str = ""
    basis: Basis | None = None
    on_demand_usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        for value, kind in ((self.market, Market), (self.device, Device), (self.basis or "stated", Basis)):
            if value not in get_args(kind):
                raise PriceError(f"{value!r} is not one of {', '.join(get_args(kind))}")
        if not 0 < self.usd_per_hour < float("inf"):
            raise PriceError(
                f"a price must be positive, got {self.usd_per_hour} USD per hour",
                hint="for hardware that you own, spread its cost over its hours of use",
            )
        if self.num_devices < 1:
            raise PriceError(f"a price is for one device or more, got {self.num_devices}")

    @classmethod
    def fixed(cls, *, usd_per_hour: float, device: Device, num_devices: int) -> Self:
        """A price the user states for the whole machine: `--usd-per-hour`."""
        return cls(
            instance_type="custom",
            provider="",
            region="",
            market="fixed",
            usd_per_hour=usd_per_hour,
            device=device,
            num_devices=num_devices,
            accelerator=None,
            source="stated by the user",
            as_of="undated",
            basis="stated",
        )

    @property
    def usd_per_device_s(self) -> float:
        """USD for one second of one accelerator, or of one vCPU."""
        return self.usd_per_hour / self.num_devices / 3600

    @property
    def on_demand_usd_per_device_s(self) -> float:
        """The same of a spot instance on demand; 0 where that is not known."""
        return (self.on_demand_usd_per_hour or 0.0) / self.num_devices / 3600

    def to_dict(self) -> dict[str, object]:
        """Every field, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            PriceError: keys are missing or unknown, or the price is not one.
        """
        names = {field.name for field in fields(cls)}
        data = {"basis": None, "on_demand_usd_per_hour": None, **data}  # records from before they were kept
        if set(data) != names:
            raise PriceError(f"a recorded price must have exactly the keys {sorted(names)}, got {sorted(data)}")
        try:
            return cls(**data)  # type: ignore[arg-type]  # __post_init__ checks
        except TypeError as error:
            raise PriceError(f"not a price: {dict(data)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """All offers that are known."""

    offers: tuple[Offer, ...]

    @classmethod
    def load(cls, override: Path | None = None) -> Self:
        """Load the packaged table.

        Rows of `override` (same columns) replace its rows or add to them.

        A row that names no provider and no region replaces its instance type everywhere.

        Raises:
            PriceError: the override cannot be read.
        """
        own = read_offers(override) if override else []
        kept = [offer for offer in packaged_offers() if not any(replacement.replaces(offer) for replacement in own)]
        return cls(offers=tuple(sorted([*own, *kept], key=lambda offer: (offer.instance_type, offer.place))))

    def price(
        self,
        instance_type: str,
        *,
        market: str = "on_demand",
        provider: str | None = None,
        region: str | None = None,
    ) -> Price:
        """The price of an instance type.

        Where several regions sell it and none was named, the answer is theirs if they agree. Where they do not, spot
        is the cheapest one's, with the others named as `doubt`; on demand and reserved it is an error.

        Raises:
            PriceError: unknown, not sold there or in that market, or not one price; it names what there is.
        """
        if market not in MARKETS:
            raise PriceError(f"unknown market {market!r}", hint=did_you_mean(market, MARKETS))
        offers = self._sold(instance_type, provider, region)
        priced = [(offer, usd) for offer in offers if (usd := offer.usd_per_hour(market)) is not None]
        if not priced:
            raise PriceError(
                f"no {_words(market)} price is known for {instance_type}; known are: {_listing(offers)}",
                hint=f"choose another market, or {WAYS_OUT}",
            )
        lowest, highest = min(usd for _, usd in priced), max(usd for _, usd in priced)
        if highest - lowest <= _SAME_PRICE * lowest:
            return _price(*priced[0], market)
        if market != "spot":
            by_place = ", ".join(f"{offer.place} ${usd:g}" for offer, usd in priced)
            raise PriceError(
                f"the {_words(market)} price of {instance_type} depends on the place: {by_place} per hour",
                hint=f"name the region (and the provider), or {WAYS_OUT}",
            )
        return replace(
            _price(*min(priced, key=lambda one: one[1]), market),
            doubt=f"no region was named, spot is ${lowest:g} to ${highest:g} per hour, and this is the cheapest",
        )

    def offer(self, instance_type: str | None) -> Offer | None:
        """An instance type in any one place: its devices are the same in all.

        None where it is not in the table.
        """
        return next((offer for offer in self.offers if offer.instance_type == instance_type), None)

    def sells(self, instance_type: str, accelerator: str | None) -> bool:
        """Whether it has an instance type with that accelerator.

        Args:
            accelerator: by any of its names; None is one without.
        """
        return any(offer.instance_type == instance_type for offer in self.carrying(accelerator))

    def carrying(self, accelerator: str | None) -> list[Offer]:
        """The offers with that accelerator.

        Args:
            accelerator: by any of its names; None is those without.
        """
        if accelerator is None:
            return [offer for offer in self.offers if not offer.num_accelerators]
        return [offer for offer in self.offers if is_accelerator(offer.accelerator, accelerator)]

    def _sold(self, instance_type: str, provider: str | None, region: str | None) -> list[Offer]:
        everywhere = [offer for offer in self.offers if offer.instance_type == instance_type]
        if not everywhere:
            names = {offer.instance_type for offer in self.offers}
            raise PriceError(
                f"no price is known for the instance type {instance_type!r}",
                hint=f"{did_you_mean(instance_type, names)}; or {WAYS_OUT}",
            )
        here = [offer for offer in everywhere if provider in (None, offer.provider) and region in (None, offer.region)]
        if not here:
            wanted = " ".join(part for part in (provider, region) if part)
            raise PriceError(
                f"no price is known for {instance_type} at {wanted}; known are: {_listing(everywhere)}",
                hint=WAYS_OUT,
            )
        return here


def default_instance(
    accelerator: str | None, table: PriceTable, *, market: str = "on_demand", called: Sequence[str] = ()
) -> str:
    """The instance type whose price is used when nothing says which it is.

    Without an accelerator it is c7a.large, closest to the machine that the embedded default is measured on.
    With one it is the only instance type that carries it, if there is only one.

    Args:
        accelerator: the device's own name ("NVIDIA H100 80GB HBM3"), or None on a CPU.
        market: whose prices are listed with the choices.
        called: names of the machine that the table does not have, for the message.

    Raises:
        PriceError: several instance types carry that accelerator, or none does; its hint lists them with dollars.
    """
    if accelerator is None:
        return DEFAULT_CPU_INSTANCE
    offers = table.carrying(accelerator)
    names = {offer.instance_type for offer in offers}
    if len(names) == 1:
        return names.pop()
    found = f"{len(names)} instance types have it" if names else "no instance type in the table has it"
    unknown = f"; none is known for {', '.join(called)}, as this machine is called" if called else ""
    raise PriceError(
        f"no price for {accelerator!r} without an instance type; {found}{unknown}",
        hint="\n    ".join([f"name yours with --instance-type, {WAYS_OUT}", *choices(offers, market)]),
    )


def choices(offers: Iterable[Offer], market: str) -> list[str]:
    """A line for each instance type: its devices, its dollars an hour, who sells it.

    "p5.48xlarge  8 x H100  $55.04/h on demand  aws"; where it is not sold in the market, the other one's price.
    """
    by_type: defaultdict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        by_type[offer.instance_type].append(offer)
    return aligned(
        [
            (name, f"{one[0].num_accelerators} x {one[0].accelerator}", _dollars(one, market), one[0].provider)
            for name, one in sorted(by_type.items())
        ]
    )


def _dollars(offers: list[Offer], market: str) -> str:
    """The price of an instance type in all regions: "$14.08 to $18.71/h spot"."""
    for one in (market, *MARKETS):
        found = [usd for offer in offers if (usd := offer.usd_per_hour(one)) is not None]
        if found:
            low, high = f"${min(found):,.2f}", f"${max(found):,.2f}"
            return f"{low if low == high else f'{low} to {high}'}/h {one.replace('_', ' ')}"
    raise AssertionError("an offer has a price")


def _price(offer: Offer, usd_per_hour: float, market: str) -> Price:
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


def _words(market: str) -> str:
    return market.replace("_", "-")


def _listing(offers: list[Offer]) -> str:
    known = [
        f"{offer.place} {_words(market)} ${usd:g}".strip()
        for offer in offers
        for market in MARKETS
        if (usd := offer.usd_per_hour(market)) is not None
    ]
    return ", ".join(known)
