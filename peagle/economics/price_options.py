"""The price of the hardware, by instance type or as stated, and the hardware of an instance type."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from peagle.economics.prices import (
    PRICE_HINT,
    Basis,
    Device,
    Offer,
    Price,
    PriceTable,
    default_instance,
    same_accelerator,
)
from peagle.errors import ConfigError, PriceError
from peagle.hardware import Hardware, detect_machine

PRICE_OPTIONS = ("instance_type", "market", "provider", "region", "usd_per_hour", "prices")


class PriceOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    instance_type: str | None = Field(None, description="instance type of the engines, as in the price table")
    market: Literal["on_demand", "spot"] = Field("on_demand", description="which price of the instance type to use")
    provider: str | None = Field(None, description="cloud provider, if several have the instance type")
    region: str | None = Field(None, description="region, if the price depends on it")
    usd_per_hour: float | None = Field(
        None, gt=0, description="price of one machine per hour, instead of the price table"
    )
    prices: Path | None = Field(None, description="CSV of prices that adds to or replaces rows of the table")


def resolve_price(options: PriceOptions, hardware: Hardware) -> Price:
    """Return the price of the hardware. Its `basis`: stated by the user, detected machine, or assumed."""
    if options.usd_per_hour is not None:
        on_gpu = hardware.platform == "cuda"
        return Price.fixed(
            usd_per_hour=options.usd_per_hour,
            device="accelerator" if on_gpu else "vcpu",
            num_devices=hardware.num_accelerators if on_gpu else hardware.num_cpus,
        )
    return _price_from_table(options, hardware.accelerator, hardware.machine_names)


def resolve_price_defaults(options: PriceOptions, price: Price) -> dict[str, tuple[Any, str]]:
    """Return the values of options that were not set, each with its origin."""
    if price.market == "fixed":
        return {}
    resolved = {name: (getattr(price, name), str(price.basis)) for name in ("instance_type", "provider", "region")}
    resolved["usd_per_hour"] = (price.usd_per_hour, f"price table, {price.as_of}")
    return {name: value for name, value in resolved.items() if getattr(options, name) is None}


def require_price(options: PriceOptions, accelerator: str | None) -> None:
    """Check that machines that do not exist yet have a price per accelerator."""
    if options.usd_per_hour is not None:
        return
    if options.instance_type is None and accelerator is None:
        raise PriceError(
            "machines that do not exist yet have no price without an instance type",
            hint=f"set --instance-type to the type of the machines that the cluster adds, {PRICE_HINT}",
        )
    require_device(
        _price_from_table(options, accelerator, ()), "accelerator", f"engines on {accelerator or 'accelerators'}"
    )


def _price_from_table(options: PriceOptions, accelerator: str | None, machine_names: Sequence[str]) -> Price:
    table = PriceTable.load(options.prices)
    detected = next((name for name in machine_names if table.has_accelerator(name, accelerator)), None)
    basis: Basis = "assumed"
    if instance_type := options.instance_type or detected:
        basis = "stated" if options.instance_type else "detected"
    else:
        instance_type = default_instance(accelerator, table, market=options.market, machine_names=machine_names)
    regions = {offer.region for offer in table.offers if offer.instance_type == instance_type}
    region = options.region or next((name for name in machine_names if name in regions), None)
    price = table.price(instance_type, market=options.market, provider=options.provider, region=region)
    return replace(price, basis=basis)


def require_same_price(
    options: PriceOptions,
    price: Price,
    hardware: Hardware,
    *,
    before: Price,
    recorded_options: Mapping[str, Any],
    machine: str,
) -> None:
    """Check that a resumed run still has its original price: `before`, on `machine`.

    If the price options are omitted or unchanged and the machine is the same, only the price table has changed. Then a
    different price is no error, and the caller keeps the original price.
    """
    if price.device == before.device and math.isclose(price.usd_per_device_s, before.usd_per_device_s):
        return
    current_options = options.model_dump(mode="json", include=set(PRICE_OPTIONS))
    defaults = PriceOptions.model_validate({}).model_dump(mode="json")
    has_new_options = current_options not in (
        defaults,
        {name: recorded_options.get(name, value) for name, value in defaults.items()},
    )
    current_machine = billed_hardware(hardware.to_dict())
    if not has_new_options and current_machine == machine:
        return
    raise PriceError(
        f"the run costs {_per_hour(before)} on {machine}, but would now cost {_per_hour(price)} on {current_machine}",
        hint="use the same machines without price options, or set --usd-per-hour to the original price",
    )


def require_device(price: Price, device: Device, engines: str) -> None:
    """Check that the price is per `device`, by which the engines are billed."""
    if price.device != device:
        raise PriceError(
            f"the price of {price.instance_type} is per {price.device}, but {engines} are billed by the {device}",
            hint="set --instance-type to the machine, or --usd-per-hour to its price",
        )


def billed_hardware(hardware: Mapping[str, Any]) -> str:
    """Describe the part of the hardware (`Hardware.to_dict`) that determines its price: the accelerators.

    >>> billed_hardware({"platform": "cuda", "accelerator": "H100", "num_accelerators": 8, "num_cpus": 192})
    '8 x H100'
    """
    if hardware["platform"] == "cpu":
        return "CPUs"  # nodes of a cluster may have different numbers of CPUs
    return f"{hardware['num_accelerators']} x {hardware['accelerator']}"


def _per_hour(price: Price) -> str:
    return f"${price.usd_per_device_s * 3600:.4g} per {price.device}-hour ({price.instance_type}, {price.market})"


# --- hardware of other machines, from an instance type or accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU with the name and memory that `nvidia-smi` reports, without "NVIDIA"."""

    name: str
    capability: tuple[int, int]
    memory_mib: int


GPUS = {
    "L4": Gpu(name="L4", capability=(8, 9), memory_mib=23034),
    "A10G": Gpu(name="A10G", capability=(8, 6), memory_mib=23028),
    "L40S": Gpu(name="L40S", capability=(8, 9), memory_mib=46068),
    "A100-40": Gpu(name="A100-SXM4-40GB", capability=(8, 0), memory_mib=40960),
    "A100-80": Gpu(name="A100-SXM4-80GB", capability=(8, 0), memory_mib=81920),
    "H100": Gpu(name="H100 80GB HBM3", capability=(9, 0), memory_mib=81559),
    "H200": Gpu(name="H200", capability=(9, 0), memory_mib=143771),
    "B200": Gpu(name="B200", capability=(10, 0), memory_mib=183359),
    "RTX-PRO-6000": Gpu(
        name="RTX PRO 6000 Blackwell Server Edition", capability=(12, 0), memory_mib=97887
    ),
}  # fmt: skip


def configured_or_local_machine(
    options: PriceOptions, accelerator: str | None, *, num_accelerators: int
) -> tuple[Hardware, bool]:
    """Return the hardware of the configured machine and False, or else the hardware of this machine and True."""
    machine = configured_machine(options, accelerator, num_accelerators=num_accelerators)
    return (machine, False) if machine else (detect_machine(), True)


def configured_machine(options: PriceOptions, accelerator: str | None, *, num_accelerators: int) -> Hardware | None:
    """Return the machine with the configured instance type or accelerator, or None if neither is set.

    `num_accelerators` is the number per machine if no instance type is set.
    """
    kind = None if accelerator == "any" else accelerator
    offer = PriceTable.load(options.prices).offer(options.instance_type)
    if offer is not None and offer.accelerator:
        if kind and not same_accelerator(offer.accelerator, kind) and not same_accelerator(kind, offer.accelerator):
            raise ConfigError(
                f"instance_type {offer.instance_type} has {offer.accelerator}, but accelerator_type is {kind}",
                hint="use another instance type, or remove accelerator_type",
            )
        kind, num_accelerators, num_cpus = offer.accelerator, offer.num_accelerators, offer.num_vcpus
    else:
        num_cpus = num_accelerators  # an engine needs one CPU for placement
    if kind is None:
        return None
    if gpu := _gpu(kind):
        return _hardware_of_gpu(gpu, num_accelerators, num_cpus)
    raise ConfigError(
        f"unknown accelerator {kind}: its memory and precisions are not in the tables",
        hint=f"use a known accelerator ({', '.join(GPUS)}), or run peagle on a machine with this accelerator",
    )


def instance_has_accelerators(options: PriceOptions) -> bool:
    offer = PriceTable.load(options.prices).offer(options.instance_type)
    return offer is not None and offer.accelerator is not None


def hardware_of(offer: Offer) -> Hardware | None:
    """Return the hardware of an offer, or None if it has no accelerator or an unknown one."""
    gpu = _gpu(offer.accelerator) if offer.accelerator else None
    return None if gpu is None else _hardware_of_gpu(gpu, offer.num_accelerators, offer.num_vcpus)


def _gpu(accelerator: str) -> Gpu | None:
    return next((gpu for gpu in GPUS.values() if same_accelerator(accelerator, gpu.name)), None)


def _hardware_of_gpu(gpu: Gpu, num_accelerators: int, num_cpus: int) -> Hardware:
    memory_gib = gpu.memory_mib / 1024
    return Hardware(
        platform="cuda",
        accelerator=gpu.name,
        num_accelerators=num_accelerators,
        compute_capability=gpu.capability,
        memory_gib=memory_gib,
        free_memory_gib=memory_gib,
        num_cpus=num_cpus,
    )
