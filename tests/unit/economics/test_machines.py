import pytest

from peagle import hardware
from peagle.economics.machines import machine_for, named_machine
from peagle.economics.price_options import PriceOptions, resolve_price
from peagle.economics.prices import PriceTable
from peagle.errors import ConfigError


def machine(accelerator=None, **keys):
    return named_machine(PriceOptions(**keys), accelerator, num_accelerators=2)


def test_instance_type_determines_hardware_and_price():
    hardware_of_type = machine(instance_type="p5.48xlarge")
    assert (hardware_of_type.platform, hardware_of_type.accelerator, hardware_of_type.num_accelerators) == (
        "cuda",
        "H100 80GB HBM3",
        8,
    )
    assert (hardware_of_type.compute_capability, hardware_of_type.num_cpus, round(hardware_of_type.memory_gib)) == (
        (9, 0),
        192,
        80,
    )
    price = resolve_price(PriceOptions(instance_type="p5.48xlarge"), hardware_of_type)
    assert (price.num_devices, price.basis) == (8, "stated")


@pytest.mark.parametrize("keys", [{}, {"instance_type": "c7a.large"}, {"instance_type": "mine", "usd_per_hour": 1}])
def test_default_machine_is_this_one(keys):
    assert machine(**keys) is None
    assert machine("any", **keys) is None
    detected, is_here = machine_for(PriceOptions(**keys), None, num_accelerators=1)
    assert (detected.num_cpus, is_here) == (hardware.detect().num_cpus, True)


OFFERS = {offer.instance_type: offer for offer in PriceTable.load().offers if offer.accelerator}


@pytest.mark.parametrize("name", sorted(name for name, offer in OFFERS.items() if offer.accelerator != "B300"))
def test_every_priced_machine_has_known_hardware(name):
    assert machine(instance_type=name).num_accelerators == OFFERS[name].num_accelerators


def test_unknown_accelerators_are_refused():
    with pytest.raises(ConfigError, match="unknown accelerator B300"):
        machine(instance_type="p6-b300.48xlarge")


def test_instance_type_must_match_the_accelerator():
    with pytest.raises(ConfigError, match=r"p5\.48xlarge has H100, but accelerator_type is L40S"):
        machine("L40S", instance_type="p5.48xlarge")
    assert machine("H100", instance_type="p5.48xlarge") is not None
    assert machine("A100-80G", instance_type="p4de.24xlarge") is not None
