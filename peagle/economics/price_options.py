"""Options for the price of this hardware: an instance type or a sum.

It knows prices and what a node is; it does not know what runs there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from peagle.economics.prices import WAYS_OUT, Basis, Device, Price, PriceTable, default_instance
from peagle.errors import PriceError
from peagle.hardware import Hardware

PRICE_KEYS = ("instance_type", "market", "provider", "region", "usd_per_hour", "prices")


class PriceKeys(BaseModel):
    """The keys of a price, among those of commands that run engines."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    instance_type: str | None = Field(None, description="instance type that the engines run on, as in the price table")
    market: Literal["on_demand", "spot", "reserved"] = Field(
        "on_demand", description="which of the instance's prices; reserved ones are in a table of yours"
    )
    provider: str | None = Field(None, description="provider, if several sell that instance type")
    region: str | None = Field(None, description="where, if the price depends on it")
    usd_per_hour: float | None = Field(None, gt=0, description="price of one machine, instead of the table's")
    prices: Path | None = Field(None, description="CSV of prices that adds to or replaces rows of the table")


def resolve_price(keys: PriceKeys, hardware: Hardware) -> Price:
    """The price of the hardware, and how it is known: stated, detected or assumed.

    Raises:
        PriceError: there is none; it is never taken to be zero.
    """
    if keys.usd_per_hour is not None:
        on_gpu = hardware.platform == "cuda"
        return Price.fixed(
            usd_per_hour=keys.usd_per_hour,
            device="accelerator" if on_gpu else "vcpu",
            num_devices=hardware.num_accelerators if on_gpu else hardware.num_cpus,
        )
    return _of_table(keys, hardware.accelerator, hardware.machine_names)


def settled_price(keys: PriceKeys, price: Price) -> dict[str, tuple[Any, str]]:
    """The keys of the price that a user left open: value, and how it is known."""
    if price.market == "fixed":
        return {}
    found = {name: (getattr(price, name), str(price.basis)) for name in ("instance_type", "provider", "region")}
    found["usd_per_hour"] = (price.usd_per_hour, f"price table, {price.as_of}")
    return {name: value for name, value in found.items() if getattr(keys, name) is None}


def require_price(keys: PriceKeys, accelerator: str | None) -> None:
    """Require a price for machines that are not there yet, before any is bought.

    Args:
        accelerator: by Ray's name; None where any will do.

    Raises:
        PriceError: nothing is stated, and there is not one instance type only with that accelerator.
    """
    if keys.usd_per_hour is not None:
        return
    if keys.instance_type is None and accelerator is None:
        raise PriceError(
            "no price without an instance type for machines that are not there yet",
            hint=f"name the one that the cluster adds with --instance-type, {WAYS_OUT}",
        )
    require_device(_of_table(keys, accelerator, ()), "accelerator", f"engines on {accelerator or 'accelerators'}")


def _of_table(keys: PriceKeys, accelerator: str | None, machine_names: Sequence[str]) -> Price:
    """The table's price of a machine.

    Args:
        machine_names: as `Hardware.machine_names`; a type or region among them counts where the table has it.
    """
    table = PriceTable.load(keys.prices)
    detected = next((name for name in machine_names if table.sells(name, accelerator)), None)
    basis: Basis = "assumed"
    if instance := keys.instance_type or detected:
        basis = "stated" if keys.instance_type else "detected"
    else:
        instance = default_instance(accelerator, table, market=keys.market, called=machine_names)
    regions = {offer.region for offer in table.offers if offer.instance_type == instance}
    region = keys.region or next((name for name in machine_names if name in regions), None)
    return replace(table.price(instance, market=keys.market, provider=keys.provider, region=region), basis=basis)


def require_same_price(
    keys: PriceKeys, price: Price, hardware: Hardware, *, before: Price, keys_before: Mapping[str, Any], machine: str
) -> None:
    """Require the price that a continued run began with, for it has only one.

    A table that says something else since then changes nothing, and neither does leaving the keys out: the price stays.
    Another price that is stated is refused, and so are accelerators that cost something else.

    Args:
        price: what the keys and the hardware come to now.
        before, keys_before: the price at the beginning, and the keys as JSON has them, with which it was stated.
        machine: `machine_of` the hardware at the beginning.

    Raises:
        PriceError: it cannot; names both prices.
    """
    if price.device == before.device and math.isclose(price.usd_per_device_s, before.usd_per_device_s):
        return
    asked = keys.model_dump(mode="json", include=set(PRICE_KEYS))
    defaults = PriceKeys.model_validate({}).model_dump(mode="json")
    is_stated = asked not in (defaults, {key: keys_before.get(key, value) for key, value in defaults.items()})
    here = machine_of(hardware.to_dict())
    if not is_stated and here == machine:
        return
    raise PriceError(
        f"it is charged at {_per_hour(before)} on {machine}, and this would cost {_per_hour(price)} on {here}",
        hint="leave the price out and use the same machines; the same price as before can be stated for others too",
    )


def require_device(price: Price, device: Device, engines: str) -> None:
    """Require a price for the device that engines are paid by.

    Nothing could be charged otherwise.

    Args:
        engines: whose, for the message.

    Raises:
        PriceError: it is for the other kind.
    """
    if price.device != device:
        raise PriceError(
            f"the price of {price.instance_type} is per {price.device}, but {engines} are billed by the {device}",
            hint="name the machine that they run on with --instance-type, or its price with --usd-per-hour",
        )


def machine_of(hardware: Mapping[str, Any]) -> str:
    """The part of a machine (`Hardware.to_dict`) that makes its price.

    Its accelerators, or that it has none.

    >>> machine_of({"platform": "cuda", "accelerator": "H100", "num_accelerators": 8, "num_cpus": 192})
    '8 x H100'
    """
    if hardware["platform"] == "cpu":
        return "CPUs"  # of which another node of the same cluster may have another number
    return f"{hardware['num_accelerators']} x {hardware['accelerator']}"


def _per_hour(price: Price) -> str:
    return f"${price.usd_per_device_s * 3600:.4g} an hour and {price.device} ({price.instance_type}, {price.market})"
