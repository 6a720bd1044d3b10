from dataclasses import replace

import devices
import pytest

from peagle.economics.price_options import (
    PriceOptions,
    billed_hardware,
    configured_machine,
    configured_or_local_machine,
    require_price,
    require_same_price,
    resolve_price,
)
from peagle.economics.prices import Price, PriceTable
from peagle.errors import ConfigError, PriceError
from peagle.hardware import detect

CPU = devices.cpu(num_cpus=4)


def gpus(number, name="H100"):
    return devices.gpu(accelerator=name, num_accelerators=number)


@pytest.mark.parametrize(
    ("options", "hardware", "machine_names", "expected"),
    [
        ({}, CPU, (), ("c7a.large", "assumed")),
        ({}, CPU, ("m7i.large",), ("m7i.large", "detected")),
        ({}, CPU, ("m7i.xlarge",), ("c7a.large", "assumed")),  # an m7i.xlarge has no known price
        ({}, CPU, ("g5.xlarge",), ("c7a.large", "assumed")),  # engines on the CPUs of a machine with a GPU
        ({"instance_type": "c7a.large"}, CPU, ("m7i.large",), ("c7a.large", "stated")),
        ({"usd_per_hour": 1}, CPU, ("m7i.large",), ("custom", "stated")),
        ({}, gpus(8, "NVIDIA H100 80GB HBM3"), ("p5.48xlarge",), ("p5.48xlarge", "detected")),
        ({}, gpus(8, "NVIDIA H100 80GB HBM3"), ("workers", "p5.48xlarge"), ("p5.48xlarge", "detected")),
        ({}, gpus(8, "NVIDIA B300"), (), ("p6-b300.48xlarge", "assumed")),
    ],
)
def test_price_is_stated_detected_or_assumed(options, hardware, machine_names, expected):
    price = resolve_price(PriceOptions(**options), replace(hardware, machine_names=machine_names))
    assert (price.instance_type, price.basis) == expected


def test_gpu_of_several_instance_types_has_no_price():
    with pytest.raises(PriceError, match="13 instance types have it") as error:
        resolve_price(PriceOptions(), gpus(8, "NVIDIA H100 80GB HBM3"))
    assert "8 x H100" in error.value.hint
    azure = replace(gpus(8, "NVIDIA H100 80GB HBM3"), machine_names=("Standard_ND96isr_H100_v5",))
    with pytest.raises(PriceError, match="the table has no Standard_ND96isr_H100_v5, the type of this machine"):
        resolve_price(PriceOptions(), azure)


def test_spot_price_of_the_detected_region():
    detected = replace(gpus(8), machine_names=("p5.48xlarge", "us-west-2"))
    assert resolve_price(PriceOptions(market="spot"), detected).usd_per_hour == 17.84685
    assert resolve_price(PriceOptions(market="spot", region="us-east-1"), detected).usd_per_hour == 18.7089
    unknown_region = replace(detected, machine_names=("p5.48xlarge", "ap-south-1"))  # a region not in the table
    assert resolve_price(PriceOptions(market="spot"), unknown_region).region == "us-east-2", "the cheapest region"


@pytest.mark.parametrize(
    ("options", "accelerator"),
    [({"usd_per_hour": 1}, None), ({"instance_type": "p5.48xlarge"}, "H100"), ({"instance_type": "g6.xlarge"}, None)],
)
def test_require_price_accepts_machines_with_a_price(options, accelerator):
    require_price(PriceOptions(**options), accelerator)


@pytest.mark.parametrize(
    ("options", "accelerator", "reason"),
    [
        ({}, None, "machines that do not exist yet have no price"),
        ({}, "H100", "no price for 'H100' without an instance type; 13"),
        ({"instance_type": "c7a.large"}, "H100", "c7a.large is per vcpu, but engines on H100 are billed by the acc"),
        ({"instance_type": "p5.48xlrage"}, "H100", "no price for the instance type"),
    ],
)
def test_require_price_refuses_machines_without_a_price(options, accelerator, reason):
    with pytest.raises(PriceError, match=reason):
        require_price(PriceOptions(**options), accelerator)


def require_earlier_price(options_before, hardware_before, options, hardware):
    """Check that a run, resumed with other price options or on other hardware, has the price that it had before."""
    require_same_price(
        options,
        resolve_price(options, hardware),
        hardware,
        before=resolve_price(options_before, hardware_before),
        recorded_options=options_before.model_dump(mode="json"),
        machine=billed_hardware(hardware_before.to_dict()),
    )


H100_SPOT = PriceOptions(instance_type="p5.48xlarge", market="spot", provider="aws", region="us-east-1")


@pytest.mark.parametrize(
    ("options_before", "hardware_before", "options", "hardware"),
    [
        (PriceOptions(usd_per_hour=8), gpus(8), PriceOptions(usd_per_hour=8), gpus(8)),
        (PriceOptions(usd_per_hour=8), gpus(8), PriceOptions(usd_per_hour=1), gpus(1)),  # equal per accelerator
        (H100_SPOT, gpus(8), H100_SPOT, gpus(8, "H200")),  # the price is stated
        (PriceOptions(usd_per_hour=1), CPU, PriceOptions(), CPU),  # the earlier price is kept if none is stated
        # the instance type is now detected, and has the same price
        (PriceOptions(), CPU, PriceOptions(), replace(CPU, machine_names=("m7i.large",))),
    ],
)
def test_run_continues_at_the_same_price(options_before, hardware_before, options, hardware):
    require_earlier_price(options_before, hardware_before, options, hardware)


@pytest.mark.parametrize(
    ("options_before", "hardware_before", "options", "hardware"),
    [
        (PriceOptions(usd_per_hour=8), gpus(8), PriceOptions(usd_per_hour=9), gpus(8)),
        (PriceOptions(usd_per_hour=8), gpus(8), H100_SPOT, gpus(8)),
        (PriceOptions(usd_per_hour=8), gpus(8), PriceOptions(usd_per_hour=8), gpus(1)),
        (H100_SPOT, gpus(8), PriceOptions(usd_per_hour=2), gpus(1, "L4")),
        (PriceOptions(usd_per_hour=8), gpus(8), PriceOptions(usd_per_hour=8), CPU),
    ],
)
def test_run_does_not_continue_at_another_price(options_before, hardware_before, options, hardware):
    with pytest.raises(PriceError, match=r"the run costs \$.* on 8 x H100, but would now cost \$"):
        require_earlier_price(options_before, hardware_before, options, hardware)


def test_run_continues_after_a_change_of_the_price_table():
    before, price = Price.fixed(usd_per_hour=99, device="accelerator", num_devices=8), resolve_price(H100_SPOT, gpus(8))
    recorded_options = H100_SPOT.model_dump(mode="json", exclude_none=True)
    require_same_price(H100_SPOT, price, gpus(8), before=before, recorded_options=recorded_options, machine="8 x H100")


# --- the hardware of an instance type or accelerator


def hardware_of(accelerator=None, **options):
    return configured_machine(PriceOptions(**options), accelerator, num_accelerators=2)


def test_instance_type_determines_hardware_and_price():
    hardware = hardware_of(instance_type="p5.48xlarge")
    expected = {
        "platform": "cuda", "accelerator": "H100 80GB HBM3", "num_accelerators": 8, "compute_capability": (9, 0),
        "num_cpus": 192,
    }  # fmt: skip
    assert {name: getattr(hardware, name) for name in expected} == expected
    assert round(hardware.memory_gib) == 80
    price = resolve_price(PriceOptions(instance_type="p5.48xlarge"), hardware)
    assert (price.num_devices, price.basis) == (8, "stated")


@pytest.mark.parametrize("options", [{}, {"instance_type": "c7a.large"}, {"instance_type": "mine", "usd_per_hour": 1}])
def test_hardware_of_this_machine_is_the_default(options):
    assert hardware_of(**options) is None
    assert hardware_of("any", **options) is None
    hardware, is_for_this_machine = configured_or_local_machine(PriceOptions(**options), None, num_accelerators=1)
    assert (hardware.num_cpus, is_for_this_machine) == (detect().num_cpus, True)


OFFERS = {offer.instance_type: offer for offer in PriceTable.load().offers if offer.accelerator}


@pytest.mark.parametrize("name", sorted(name for name, offer in OFFERS.items() if offer.accelerator != "B300"))
def test_every_instance_type_has_known_hardware(name):
    assert hardware_of(instance_type=name).num_accelerators == OFFERS[name].num_accelerators


def test_unknown_accelerators_are_refused():
    with pytest.raises(ConfigError, match="unknown accelerator B300"):
        hardware_of(instance_type="p6-b300.48xlarge")


def test_instance_type_must_match_the_accelerator():
    with pytest.raises(ConfigError, match=r"p5\.48xlarge has H100, but accelerator_type is L40S"):
        hardware_of("L40S", instance_type="p5.48xlarge")
    assert hardware_of("H100", instance_type="p5.48xlarge") is not None
    assert hardware_of("A100-80G", instance_type="p4de.24xlarge") is not None
