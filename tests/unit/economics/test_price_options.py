import pytest

from peagle.economics.price_options import PriceKeys, machine_of, require_same_price, resolve_price
from peagle.economics.prices import Price
from peagle.errors import PriceError
from peagle.hardware import Hardware

CPU = Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=4)


def gpus(number, name="H100"):
    return Hardware(
        platform="cuda", accelerator=name, num_accelerators=number, compute_capability=(9, 0), memory_gib=80,
        free_memory_gib=80, num_cpus=8,
    )  # fmt: skip


def continued(before, first, keys, here):
    """Continue what began with keys `before` on the hardware `first` with `keys` on `here`."""
    require_same_price(
        keys,
        resolve_price(keys, here),
        here,
        before=resolve_price(before, first),
        keys_before=before.model_dump(mode="json"),
        machine=machine_of(first.to_dict()),
    )


H100_SPOT = PriceKeys(instance_type="p5.48xlarge", market="spot", provider="aws", region="us-east-1")


@pytest.mark.parametrize(
    ("before", "first", "keys", "here"),
    [
        (PriceKeys(usd_per_hour=8), gpus(8), PriceKeys(usd_per_hour=8), gpus(8)),
        (PriceKeys(usd_per_hour=8), gpus(8), PriceKeys(usd_per_hour=1), gpus(1)),  # the same by the accelerator
        (H100_SPOT, gpus(8), H100_SPOT, gpus(8, "H200")),  # stated for them too
        (PriceKeys(usd_per_hour=1), CPU, PriceKeys(), CPU),  # nothing is stated: it stays
    ],
)
def test_what_costs_the_same_or_says_nothing_goes_on(before, first, keys, here):
    continued(before, first, keys, here)


@pytest.mark.parametrize(
    ("before", "first", "keys", "here"),
    [
        (PriceKeys(usd_per_hour=8), gpus(8), PriceKeys(usd_per_hour=9), gpus(8)),
        (PriceKeys(usd_per_hour=8), gpus(8), H100_SPOT, gpus(8)),
        (PriceKeys(usd_per_hour=8), gpus(8), PriceKeys(usd_per_hour=8), gpus(1)),
        (H100_SPOT, gpus(8), PriceKeys(usd_per_hour=2), gpus(1, "L4")),
        (PriceKeys(usd_per_hour=8), gpus(8), PriceKeys(usd_per_hour=8), CPU),
    ],
)
def test_another_price_is_refused(before, first, keys, here):
    with pytest.raises(PriceError, match=r"it is charged at \$.* on 8 x H100, and this would cost \$"):
        continued(before, first, keys, here)


def test_a_table_that_says_something_else_since_then_changes_nothing():
    old = Price.fixed(usd_per_hour=99, device="accelerator", num_devices=8)
    require_same_price(
        H100_SPOT,
        resolve_price(H100_SPOT, gpus(8)),
        gpus(8),
        before=old,
        keys_before={"instance_type": "p5.48xlarge", "market": "spot", "provider": "aws", "region": "us-east-1"},
        machine="8 x H100",
    )
