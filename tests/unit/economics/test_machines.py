import pytest

from peagle import hardware
from peagle.economics.machines import machine_for, named_machine
from peagle.economics.price_options import PriceOptions, resolve_price
from peagle.economics.prices import PriceTable
from peagle.errors import ConfigError


def machine(accelerator=None, **keys):
    return named_machine(PriceOptions(**keys), accelerator, num_accelerators=2)


def test_instance_type_determines_hardware_and_price():
    result = named(instance_type="p5.48xlarge")
    assert (result.platform, result.accelerator, result.num_accelerators) == ("cuda", "H100 80GB HBM3", 8)
    assert (result.compute_capability, result.num_cpus, round(result.memory_gib)) == ((9, 0), 192, 80)
    price = resolve_price(PriceOptions(instance_type="p5.48xlarge"), result)
    assert (price.num_devices, price.basis) == (8, "stated")


@pytest.mark.parametrize("keys", [{}, {"instance_type": "c7a.large"}, {"instance_type": "mine", "usd_per_hour": 1}])
def test_without_an_accelerator_it_is_this_machine(keys):
    assert named(**keys) is None
    assert named("any", **keys) is None
    result, is_here = machine_for(PriceOptions(**keys), None, num_accelerators=1)
    assert (result.num_cpus, is_here) == (hardware.detect().num_cpus, True)


OFFERS = {offer.instance_type: offer for offer in PriceTable.load().offers if offer.accelerator}


@pytest.mark.parametrize("name", sorted(name for name, offer in OFFERS.items() if offer.accelerator != "B300"))
def test_every_priced_machine_has_known_hardware(name):
    assert machine(instance_type=name).num_accelerators == OFFERS[name].num_accelerators


def test_unknown_accelerators_are_refused():
    with pytest.raises(ConfigError, match="unknown accelerator B300"):
        machine(instance_type="p6-b300.48xlarge")


def test_instance_type_must_match_the_accelerator():
    with pytest.raises(ConfigError, match=r"p5\.48xlarge has H100, and accelerator_type is L40S"):
        machine("L40S", instance_type="p5.48xlarge")
    assert machine("H100", instance_type="p5.48xlarge") is not None
    assert machine("A100-80G", instance_type="p4de.24xlarge") is not None
