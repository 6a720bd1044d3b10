from dataclasses import replace

import pytest

from peagle.economics.price_options import PriceKeys, machine_of, require_price, require_same_price, resolve_price
from peagle.economics.prices import Price
from peagle.errors import PriceError
from peagle.hardware import Hardware

CPU = Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=4)


def gpus(number, name="H100"):
    return Hardware(
        platform="cuda", accelerator=name, num_accelerators=number, compute_capability=(9, 0), memory_gib=80,
        free_memory_gib=80, num_cpus=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "here", "names", "expected"),
    [
        ({}, CPU, (), ("c7a.large", "assumed")),
        ({}, CPU, ("m7i.large",), ("m7i.large", "detected")),
        ({}, CPU, ("m7i.xlarge",), ("c7a.large", "assumed")),  # no price is known for it
        ({}, CPU, ("g5.xlarge",), ("c7a.large", "assumed")),  # engines on the CPUs of a machine with a GPU
        ({"instance_type": "c7a.large"}, CPU, ("m7i.large",), ("c7a.large", "stated")),
        ({"usd_per_hour": 1}, CPU, ("m7i.large",), ("custom", "stated")),
        ({}, gpus(8, "NVIDIA H100 80GB HBM3"), ("p5.48xlarge",), ("p5.48xlarge", "detected")),
        ({}, gpus(8, "NVIDIA H100 80GB HBM3"), ("workers", "p5.48xlarge"), ("p5.48xlarge", "detected")),
        ({}, gpus(8, "NVIDIA B300"), (), ("p6-b300.48xlarge", "assumed")),
    ],
)
def test_flags_win_then_what_the_machine_says_and_the_rest_is_assumed(keys, here, names, expected):
    price = resolve_price(PriceKeys(**keys), replace(here, machine_names=names))
    assert (price.instance_type, price.basis) == expected


def test_a_gpu_that_several_types_have_is_never_guessed():
    with pytest.raises(PriceError, match="13 instance types have it") as error:
        resolve_price(PriceKeys(), gpus(8, "NVIDIA H100 80GB HBM3"))
    assert "8 x H100" in error.value.hint
    azure = replace(gpus(8, "NVIDIA H100 80GB HBM3"), machine_names=("Standard_ND96isr_H100_v5",))
    with pytest.raises(PriceError, match="none is known for Standard_ND96isr_H100_v5, as this machine is called"):
        resolve_price(PriceKeys(), azure)


def test_spot_is_that_of_the_region_that_the_machine_says():
    here = replace(gpus(8), machine_names=("p5.48xlarge", "us-west-2"))
    assert resolve_price(PriceKeys(market="spot"), here).usd_per_hour == 17.84685
    assert resolve_price(PriceKeys(market="spot", region="us-east-1"), here).usd_per_hour == 18.7089
    elsewhere = replace(here, machine_names=("p5.48xlarge", "ap-south-1"))  # not in the table
    assert resolve_price(PriceKeys(market="spot"), elsewhere).region == "us-east-2"


@pytest.mark.parametrize(
    ("keys", "accelerator"),
    [({"usd_per_hour": 1}, None), ({"instance_type": "p5.48xlarge"}, "H100"), ({"instance_type": "g6.xlarge"}, None)],
)
def test_machines_that_are_not_there_yet_have_a_stated_price(keys, accelerator):
    require_price(PriceKeys(**keys), accelerator)


@pytest.mark.parametrize(
    ("keys", "accelerator", "reason"),
    [
        ({}, None, "without an instance type for machines that are not there yet"),
        ({}, "H100", "no price for 'H100' without an instance type; 13"),
        ({"instance_type": "c7a.large"}, "H100", "c7a.large is per vcpu, but engines on H100 are billed by the acc"),
        ({"instance_type": "p5.48xlrage"}, "H100", "no price is known for the instance type"),
    ],
)
def test_machines_without_a_price_are_refused_before_they_are_there(keys, accelerator, reason):
    with pytest.raises(PriceError, match=reason):
        require_price(PriceKeys(**keys), accelerator)


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
        (PriceKeys(), CPU, PriceKeys(), replace(CPU, machine_names=("m7i.large",))),  # nor where another is detected
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
