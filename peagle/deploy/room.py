"""Check from the catalog and the price table that a machine can hold a model, before anything is downloaded.

It counts weights, one step and CUDA graphs. The KV cache needs the model's `config.json`.
"""

from dataclasses import replace

from peagle.catalog.cards import load_catalog
from peagle.economics.price_options import hardware_of
from peagle.economics.prices import Offer
from peagle.engine.keys import TargetOptions
from peagle.engine.memory import Footprint, check_capacity, checkpoint_bytes
from peagle.engine.spec import EngineSpec
from peagle.errors import CapacityError

_GIB = 1024**3
_HINT = "name a larger instance type; `peagle models {}` shows its memory"


def require_room(offer: Offer, keys: TargetOptions, *, pipeline_parallel_size: int = 1, num_nodes: int = 1) -> None:
    """Refuse a machine that clearly cannot hold a model of the catalog.

    Passes if the model has no card, or the machine's accelerator or memory is unknown.

    Args:
        num_nodes: machines of one engine.

    Raises:
        CapacityError: the weights alone are too large.
        PrecisionError: the accelerator does not support the precision.
    """
    card = load_catalog().find(keys.model)
    if card is None or card.architecture.num_parameters is None:
        return
    native = card.precision.native_quantization
    num_bytes = checkpoint_bytes(card.architecture.num_parameters, native)
    if offer.accelerator is None:
        if offer.memory_gib is not None and num_bytes / _GIB > offer.memory_gib:
            raise CapacityError(
                f"the weights of {card.name} are {num_bytes / _GIB:.1f} GiB, and {offer.instance_type} has "
                f"{offer.memory_gib:g} GiB of memory and no accelerator",
                hint=_HINT.format(card.name),
            )
        return
    hardware = hardware_of(offer)
    if hardware is None:
        return
    weights = Footprint(
        weights_bytes=num_bytes,
        weight_dtype_bytes=2,
        context_tokens=1,
        num_layers=0,
        num_sliding_layers=0,
        sliding_window_tokens=0,
        kv_elements_per_token=0,
        full_kv_elements=0,
    )
    spec = EngineSpec(
        model=card.name,
        precision=keys.precision,
        native_quantization=native,
        tensor_parallel_size=keys.tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        num_nodes=num_nodes,
        gpu_memory_utilization=keys.gpu_memory_utilization,
        enforce_eager=keys.enforce_eager,
    )
    # `machines_for` counts machines. This checks one engine, with as many accelerators as it needs per machine.
    machine = replace(hardware, num_accelerators=max(hardware.num_accelerators, spec.accelerators_per_node))
    try:
        check_capacity(spec, machine, known=weights)
    except CapacityError as error:
        raise CapacityError(
            f"{offer.instance_type}: {error.message}",
            hint=f"{error.hint}, or {_HINT.format(card.name)}",
        ) from error
