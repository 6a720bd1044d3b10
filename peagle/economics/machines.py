"""Describe the hardware of a machine that is not available here, from its instance type or accelerator.

The price table lists the devices of an instance type, and `CARDS` the properties of each accelerator. Plans note that
this hardware was not detected.
"""

from dataclasses import dataclass

from peagle.economics.price_options import PriceOptions
from peagle.economics.prices import Offer, PriceTable, is_accelerator
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from peagle.machine import detect_machine

_ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An accelerator as `nvidia-smi` reports it.

    Attributes:
        memory_mib: `nvidia-smi --query-gpu=memory.total`.
    """

    name: str
    capability: tuple[int, int]
    memory_mib: int


CARDS = {
    "L4": Card(name="L4", capability=(8, 9), memory_mib=23034),
    "A10G": Card(name="A10G", capability=(8, 6), memory_mib=23028),
    "L40S": Card(name="L40S", capability=(8, 9), memory_mib=46068),
    "A100-40": Card(name="A100-SXM4-40GB", capability=(8, 0), memory_mib=40960),
    "A100-80": Card(name="A100-SXM4-80GB", capability=(8, 0), memory_mib=81920),
    "H100": Card(name="H100 80GB HBM3", capability=(9, 0), memory_mib=81559),
    "H200": Card(name="H200", capability=(9, 0), memory_mib=143771),
    "B200": Card(name="B200", capability=(10, 0), memory_mib=183359),
    "RTX-PRO-6000": Card(
        name="RTX PRO 6000 Blackwell Server Edition", capability=(12, 0), memory_mib=97887
    ),
}  # fmt: skip


def machine_for(keys: PriceOptions, accelerator: str | None, *, num_accelerators: int) -> tuple[Hardware, bool]:
    """Return the hardware of the configured machine, else of this machine, and whether it is this machine.

    Arguments and errors are those of `named_machine`.
    """
    named = named_machine(keys, accelerator, num_accelerators=num_accelerators)
    return (named, False) if named else (detect_machine(), True)


def named_machine(keys: PriceOptions, accelerator: str | None, *, num_accelerators: int) -> Hardware | None:
    """Return the machine that a configuration names, or None.

    Args:
        num_accelerators: number per machine, used if no instance type is named.
    """
    kind = None if accelerator == _ANY else accelerator
    offer = _offer(keys)
    if offer is not None and offer.accelerator:
        if kind and not is_accelerator(offer.accelerator, kind) and not is_accelerator(kind, offer.accelerator):
            raise ConfigError(
                f"instance_type {offer.instance_type} has {offer.accelerator}, but accelerator_type is {kind}",
                hint="use another instance type, or remove accelerator_type",
            )
        return _machine(offer.accelerator, offer.num_accelerators, offer.num_vcpus)
    # An engine needs one CPU for placement.
    return None if kind is None else _machine(kind, num_accelerators, num_cpus=num_accelerators)


def names_accelerators(keys: PriceOptions) -> bool:
    offer = _offer(keys)
    return offer is not None and offer.accelerator is not None


def _offer(keys: PriceOptions) -> Offer | None:
    return PriceTable.load(keys.prices).offer(keys.instance_type)


def hardware_of(offer: Offer) -> Hardware | None:
    """Return the hardware of an offer, or None if it has no accelerator or an unknown one."""
    card = _card(offer.accelerator) if offer.accelerator else None
    return None if card is None else _of_cards(card, offer.num_accelerators, offer.num_vcpus)


def _card(accelerator: str) -> Card | None:
    return next((card for card in CARDS.values() if is_accelerator(accelerator, card.name)), None)


def _machine(accelerator: str, num_accelerators: int, num_cpus: int) -> Hardware:
    card = _card(accelerator)
    if card is None:
        raise ConfigError(
            f"unknown accelerator {accelerator}: its memory and precisions are not in the tables",
            hint=f"known accelerators: {', '.join(CARDS)}; on the machine itself, peagle asks the driver",
        )
    return _of_cards(card, num_accelerators, num_cpus)


def _of_cards(card: Card, num_accelerators: int, num_cpus: int) -> Hardware:
    memory_gib = card.memory_mib / 1024
    return Hardware(
        platform="cuda",
        accelerator=card.name,
        num_accelerators=num_accelerators,
        compute_capability=card.capability,
        memory_gib=memory_gib,
        free_memory_gib=memory_gib,
        num_cpus=num_cpus,
    )
