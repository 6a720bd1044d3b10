"""The machines that a measurement holds for, with their prices.

A cell was measured on one kind of machine; another instance type can be priced in its place where it has the same
accelerator. Published speeds hold for every machine with theirs.
"""

from collections.abc import Sequence
from typing import Literal

from peagle.economics.offers import Offer, is_accelerator
from peagle.economics.prices import Price, PriceTable
from peagle.errors import ConfigError, PriceError
from peagle.planning.config import PlanConfig
from peagle.planning.sweeps import Sweep

Market = Literal["on_demand", "spot"]


def pairs(
    config: PlanConfig, sweeps: Sequence[Sweep], table: PriceTable, reasons: list[str]
) -> list[tuple[Sweep, Price]]:
    """Each sweep with the prices of its machines.

    An instance type has to be one of some sweep's.

    Raises:
        PriceError: no price is known for a machine.
        ConfigError: no sweep holds for an instance type, or a stated price is of no market.
    """
    found: list[tuple[Sweep, Price]] = []
    misfits: dict[str, list[str]] = {}
    for sweep in sweeps:
        for price in _prices(config, sweep, table, reasons):
            if (why := _why_other(sweep, price, table)) is None:
                found.append((sweep, price))
            else:
                misfits.setdefault(price.instance_type, []).append(why)
    fitting = {price.instance_type for _, price in found}
    for name, whys in misfits.items():
        if name not in fitting:
            raise ConfigError(
                "\n  ".join(dict.fromkeys(whys)),
                hint=f"measure there: {' or '.join(dict.fromkeys(sweep.remeasure for sweep in sweeps))}; "
                "or name instance types with the same accelerator",
            )
        reasons += whys
    return found


def _prices(config: PlanConfig, sweep: Sweep, table: PriceTable, reasons: list[str]) -> list[Price]:
    """The prices of the machines that a sweep compares, by region and market.

    Raises:
        PriceError: not one is known.
        ConfigError: spot is wanted, and the price was stated, which is of no market.
    """
    if sweep.stated is not None and not config.instance_types:
        if config.market == "spot":
            raise ConfigError(
                f"{sweep.name} was measured at a stated price, which is of no market, and spot is wanted",
                hint="name the machine with --instance-types, or leave --market out",
            )
        return [sweep.stated]
    names = config.instance_types or _machines_of(config, sweep, table)
    if not names:
        why = f"no price is known for a machine with {sweep.accelerator} there"
        raise PriceError(
            f"{sweep.name}: {why}" if sweep.is_published else f"{sweep.name} was measured without a price",
            hint="name the machine with --instance-types",
        )
    found: list[Price] = []
    errors: list[PriceError] = []
    for name in names:
        for market in _markets(config):
            for provider, region in _places(config, name, table):
                try:
                    price = table.price(name, market=market, provider=provider, region=region)
                except PriceError as error:
                    errors.append(error)
                    continue
                found.append(price)
    if not found:
        raise errors[0]
    if config.instance_types or sweep.instance_type:  # of machines that nobody named, no market is missed
        reasons += [error.message for error in errors]
    return found


def _machines_of(config: PlanConfig, sweep: Sweep, table: PriceTable) -> list[str]:
    """The machine that was measured on, if it has a name.

    Published speeds have all machines with their accelerator, where the user allows.
    """
    if not sweep.is_published:
        return [sweep.instance_type] if sweep.instance_type else []
    kind = sweep.accelerator or ""
    carrying = [offer for offer in _allowed(config, table) if is_accelerator(offer.accelerator, kind)]
    return list(dict.fromkeys(offer.instance_type for offer in carrying))


def _places(config: PlanConfig, instance_type: str, table: PriceTable) -> list[tuple[str | None, str | None]]:
    """Where it is sold, of what the user allows; what the user named where it is not."""
    offers = [offer for offer in _allowed(config, table) if offer.instance_type == instance_type]
    return [(offer.provider, offer.region) for offer in offers] or [(config.provider, config.region)]


def _allowed(config: PlanConfig, table: PriceTable) -> list[Offer]:
    """The offers of the provider and the region that the user names."""
    return [
        offer
        for offer in table.offers
        if config.provider in (None, offer.provider) and config.region in (None, offer.region)
    ]


def _markets(config: PlanConfig) -> tuple[Market, ...]:
    return ("on_demand", "spot") if config.market == "both" else (config.market,)


def require_other(sweep: Sweep, price: Price) -> None:
    """Refuse a named machine that cannot run the measured engine.

    Any other is only left out.
    """
    if sweep.instance_type == price.instance_type:
        raise ConfigError(
            f"{sweep.name} is priced as {price.instance_type}, which has {price.num_devices} devices, and an engine of "
            f"it holds {sweep.devices_per_engine}: it was measured on another machine",
            hint="state that machine's price: the same `peagle bench` with --usd-per-hour measures nothing again; in a "
            "file of others mend instance_type or devices_per_engine",
        )


def _why_other(sweep: Sweep, price: Price, table: PriceTable) -> str | None:
    """Why the measured speed does not hold on a machine; None where it does."""
    if sweep.instance_type == price.instance_type or price is sweep.stated:
        return None
    if sweep.instance_type is None:
        # The machine has no name here, so a CPU is taken at its word; an accelerator says what it is.
        where = sweep.accelerator or "CPUs"
        is_same = is_accelerator(price.accelerator, where) if sweep.accelerator else price.accelerator is None
    else:
        measured = {offer.accelerator for offer in table.offers if offer.instance_type == sweep.instance_type}
        on = ", ".join(str(accelerator or "no accelerator") for accelerator in measured)
        where = f"{sweep.instance_type} ({on or 'not in the price table'})"
        is_same = price.accelerator is not None and (not measured or price.accelerator in measured)
    if is_same:
        return None
    return (
        f"{sweep.name} was measured on {where}, and {price.instance_type} has {price.accelerator or 'no accelerator'}: "
        "its speed is not known"
    )
