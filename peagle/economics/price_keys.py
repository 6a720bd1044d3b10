"""The price of this hardware from the keys with which a user names one: an instance type, or a sum.

It knows prices and what a node is; it does not know what runs there.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from peagle.economics.prices import Price, PriceTable, default_instance
from peagle.hardware import Hardware

PRICE_KEYS = ("instance_type", "market", "provider", "region", "usd_per_hour", "prices")


class PriceKeys(BaseModel):
    """What a user can say of the price; commands that run engines have these keys among their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_type: str | None = Field(None, description="what the engines run on, as in the price table")
    market: Literal["on_demand", "spot"] = Field("on_demand", description="which of the instance's prices")
    provider: str | None = Field(None, description="whose price, where several sell that instance type")
    region: str | None = Field(None, description="where, if the price depends on it")
    usd_per_hour: float | None = Field(None, gt=0, description="price of one machine, in place of the table's")
    prices: Path | None = Field(None, description="CSV of prices that adds to or replaces rows of the table")


def resolve_price(keys: PriceKeys, hardware: Hardware) -> Price:
    """The price of the hardware.

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
    table = PriceTable.load(keys.prices)
    instance = keys.instance_type or default_instance(hardware.accelerator, table)
    return table.price(instance, market=keys.market, provider=keys.provider, region=keys.region)
