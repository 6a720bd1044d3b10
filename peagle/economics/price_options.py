"""Options for the price of the hardware: an instance type or a stated price."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from peagle.economics.prices import PRICE_HINT, Basis, Device, Price, PriceTable, default_instance
from peagle.errors import PriceError
from peagle.hardware import Hardware

PRICE_OPTIONS = ("instance_type", "market", "provider", "region", "usd_per_hour", "prices")


class PriceOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    instance_type: str | None = Field(None, description="instance type of the engines, as in the price table")
    market: Literal["on_demand", "spot"] = Field("on_demand", description="price of the instance type to use")
    provider: str | None = Field(None, description="cloud provider, if several have the instance type")
    region: str | None = Field(None, description="region, if the price depends on it")
    usd_per_hour: float | None = Field(
        None, gt=0, description="price of one machine per hour, instead of the price table"
    )
    prices: Path | None = Field(None, description="CSV of prices that adds to or replaces rows of the table")


def resolve_price(keys: PriceOptions, hardware: Hardware) -> Price:
    """Return the price of the hardware, and whether it is stated, detected or assumed."""
    if keys.usd_per_hour is not None:
        on_gpu = hardware.platform == "cuda"
        return Price.fixed(
            usd_per_hour=keys.usd_per_hour,
            device="accelerator" if on_gpu else "vcpu",
            num_devices=hardware.num_accelerators if on_gpu else hardware.num_cpus,
        )
    return _of_table(keys, hardware.accelerator, hardware.machine_names)


def resolve_price_defaults(keys: PriceOptions, price: Price) -> dict[str, tuple[Any, str]]:
    if price.market == "fixed":
        return {}
    found = {name: (getattr(price, name), str(price.basis)) for name in ("instance_type", "provider", "region")}
    found["usd_per_hour"] = (price.usd_per_hour, f"price table, {price.as_of}")
    return {name: value for name, value in found.items() if getattr(keys, name) is None}


def require_price(keys: PriceOptions, accelerator: str | None) -> None:
    """Check that machines that do not exist yet have a price."""
    if keys.usd_per_hour is not None:
        return
    if keys.instance_type is None and accelerator is None:
        raise PriceError(
            "machines that do not exist yet have no price without an instance type",
            hint=f"set --instance-type to the machines that the cluster adds, {PRICE_HINT}",
        )
    require_device(_of_table(keys, accelerator, ()), "accelerator", f"engines on {accelerator or 'accelerators'}")


def _of_table(keys: PriceOptions, accelerator: str | None, machine_names: Sequence[str]) -> Price:
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
    keys: PriceOptions, price: Price, hardware: Hardware, *, before: Price, keys_before: Mapping[str, Any], machine: str
) -> None:
    """Require the original price when a run continues.

    The original price is kept if the price table changed or the options are omitted. A different stated price, or
    accelerators with a different price, are refused.
    """
    if price.device == before.device and math.isclose(price.usd_per_device_s, before.usd_per_device_s):
        return
    options = keys.model_dump(mode="json", include=set(PRICE_OPTIONS))
    defaults = PriceOptions.model_validate({}).model_dump(mode="json")
    is_stated = options not in (defaults, {key: keys_before.get(key, value) for key, value in defaults.items()})
    here = machine_of(hardware.to_dict())
    if not is_stated and here == machine:
        return
    raise PriceError(
        f"the run costs {_per_hour(before)} on {machine}, but would now cost {_per_hour(price)} on {here}",
        hint="use the same machines without price options, or state the original price with --usd-per-hour",
    )


def require_device(price: Price, device: Device, engines: str) -> None:
    """Check that the price is per the billed kind of device."""
    if price.device != device:
        raise PriceError(
            f"the price of {price.instance_type} is per {price.device}, but {engines} are billed by the {device}",
            hint="set --instance-type to their machine, or --usd-per-hour to its price",
        )


def machine_of(hardware: Mapping[str, Any]) -> str:
    """Return the part of `Hardware.to_dict` that determines its price: the accelerators.

    >>> machine_of({"platform": "cuda", "accelerator": "H100", "num_accelerators": 8, "num_cpus": 192})
    '8 x H100'
    """
    if hardware["platform"] == "cpu":
        return "CPUs"  # nodes of a cluster may have different numbers of CPUs
    return f"{hardware['num_accelerators']} x {hardware['accelerator']}"


def _per_hour(price: Price) -> str:
    return f"${price.usd_per_device_s * 3600:.4g} per {price.device}-hour ({price.instance_type}, {price.market})"
