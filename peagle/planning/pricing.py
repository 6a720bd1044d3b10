"""The machines to which a measurement applies, with their prices.

A cell was measured on one instance type; other types with the same accelerator can be priced instead. Published speeds
apply to every machine with their accelerator.
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
    """Return each sweep with the prices of its machines."""
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
                hint=f"measure on it: {' or '.join(dict.fromkeys(sweep.remeasure for sweep in sweeps))}; "
                "or use instance types with the same accelerator",
            )
        reasons += whys
    return found


def _prices(config: PlanConfig, sweep: Sweep, table: PriceTable, reasons: list[str]) -> list[Price]:
    """Return the prices of the machines of a sweep, by region and market."""
    if sweep.stated is not None and not config.instance_types:
        if config.market == "spot":
            raise ConfigError(
                f"{sweep.name} was measured at a stated price, so it has no spot price",
                hint="set --instance-types to the machine, or leave --market out",
            )
        return [sweep.stated]
    names = config.instance_types or _machines_of(config, sweep, table)
    if not names:
        why = f"no price for a machine with {sweep.accelerator}"
        raise PriceError(
            f"{sweep.name}: {why}" if sweep.is_published else f"{sweep.name} was measured without a price",
            hint="set --instance-types to the machine",
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
    if config.instance_types or sweep.instance_type:  # missing markets matter only for named machines
        reasons += [error.message for error in errors]
    return found


def _machines_of(config: PlanConfig, sweep: Sweep, table: PriceTable) -> list[str]:
    if not sweep.is_published:
        return [sweep.instance_type] if sweep.instance_type else []
    kind = sweep.accelerator or ""
    carrying = [offer for offer in _allowed(config, table) if is_accelerator(offer.accelerator, kind)]
    return list(dict.fromkeys(offer.instance_type for offer in carrying))


def _places(config: PlanConfig, instance_type: str, table: PriceTable) -> list[tuple[str | None, str | None]]:
    """Return providers and regions that offer it, within the user's choice."""
    offers = [offer for offer in _allowed(config, table) if offer.instance_type == instance_type]
    return [(offer.provider, offer.region) for offer in offers] or [(config.provider, config.region)]


def _allowed(config: PlanConfig, table: PriceTable) -> list[Offer]:
    return [
        offer
        for offer in table.offers
        if config.provider in (None, offer.provider) and config.region in (None, offer.region)
    ]


def _markets(config: PlanConfig) -> tuple[Market, ...]:
    return ("on_demand", "spot") if config.market == "both" else (config.market,)


def require_other(sweep: Sweep, price: Price) -> None:
    """Refuse a named machine that cannot run the measured engine; others are only left out."""
    if sweep.instance_type == price.instance_type:
        raise ConfigError(
            f"{sweep.name} is priced as {price.instance_type}, which has {price.num_devices} devices, but its engines "
            f"use {sweep.devices_per_engine}: it was measured on another machine",
            hint="repeat `peagle bench` with --usd-per-hour, which measures nothing again; in a sweep file, correct "
            "instance_type or devices_per_engine",
        )


def _why_other(sweep: Sweep, price: Price, table: PriceTable) -> str | None:
    """Return why the measured speed does not apply to a machine, or None."""
    if sweep.instance_type == price.instance_type or price is sweep.stated:
        return None
    if sweep.instance_type is None:
        # Without an instance type, only the accelerator can be compared.
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
        f"{sweep.name} was measured on {where}, but {price.instance_type} has {price.accelerator or 'no accelerator'}: "
        "its speed is unknown"
    )
