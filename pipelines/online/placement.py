"""Placement of each model's engines on the nodes, and the check that all fit.

On CPUs, the cores are divided among the endpoint's engines and those of batches. Accelerators are allocated on demand,
and a batch's engine waits for its own, so only the endpoint's engines must fit together.
"""

from peagle.economics.prices import Device
from peagle.errors import CapacityError
from peagle.hardware import Hardware
from peagle.runs.scaling import EngineRange
from pipelines.cluster.placement import Placement, on_accelerators, place
from pipelines.online.batches.settings import num_engines
from pipelines.online.config import ServeConfig, ServedModelOptions

_FAKE_CPUS = 0.05  # fake engines use almost no CPU, so that any number fits on a node
_CAPACITY_HINT = (
    "at most {} fit: --max-replicas of all models, and with --batches --batch-engines times --batches-at-once, together"
)


def placements(config: ServeConfig, hardware: Hardware, *, num_nodes: int) -> dict[str, Placement]:
    """Return the placement of an engine, by model name.

    Raises:
        CapacityError: on CPUs, the maximum numbers of all engines do not fit together; on accelerators, the endpoint's
            engines do not fit, or those of a single batch do not.
    """
    real = _real(config)
    if hardware.platform == "cuda":
        _check_accelerators(config, real, hardware, num_nodes)
    return {
        keys.served_name: _placement(config, keys, hardware, num_nodes, sum(other.max_replicas for other in real))
        for keys in config.served
    }


def num_accelerators(config: ServeConfig) -> int:
    return sum(keys.max_replicas * size_of(keys) for keys in _real(config))


def _real(config: ServeConfig) -> list[ServedModelOptions]:
    return [keys for keys in config.served if keys.engine != "fake"]


def _placement(
    config: ServeConfig, keys: ServedModelOptions, hardware: Hardware, num_nodes: int, num_replicas: int
) -> Placement:
    if keys.engine == "fake":
        return _fake_placement(hardware)
    if hardware.platform == "cuda":
        return on_accelerators(size_of(keys))
    batches = num_engines(config)
    return place(
        hardware,
        num_engines=num_replicas + batches[0],
        most_engines=num_replicas + batches[1],
        accelerators_per_engine=size_of(keys),
        num_nodes=num_nodes,
        ask_for_fewer=_CAPACITY_HINT,
    )


def _check_accelerators(
    config: ServeConfig, real: list[ServedModelOptions], hardware: Hardware, num_nodes: int
) -> None:
    available = f"{num_nodes} node(s) have {hardware.num_accelerators} accelerator(s) each"
    needed = num_accelerators(config)
    if needed > num_nodes * hardware.num_accelerators:
        each = ", ".join(f"{keys.served_name}: {keys.max_replicas} x {size_of(keys)}" for keys in real)
        raise CapacityError(
            f"the models' engines need {needed} accelerators at once ({each}); {available}",
            hint="use a smaller --max-replicas, --tensor-parallel-size or --pipeline-parallel-size, or fewer models",
        )
    if config.batches is None or config.lends_engines:
        return
    at_start = EngineRange.parse(config.batch_engines).smallest
    for keys in real:
        if at_start > num_nodes * (hardware.num_accelerators // size_of(keys)):
            raise CapacityError(
                f"batch_engines {config.batch_engines}: a batch of {keys.served_name} starts with {at_start}"
                f" engine(s) of {size_of(keys)} accelerator(s), which do not fit; {available}",
                hint="use a smaller --batch-engines",
            )


def size_of(keys: ServedModelOptions) -> int:
    return keys.tensor_parallel_size * keys.pipeline_parallel_size


def _fake_placement(hardware: Hardware) -> Placement:
    """Return a fake engine's placement. Like a real engine, a fake engine is billed for one device."""
    device: Device = "accelerator" if hardware.platform == "cuda" else "vcpu"
    return Placement(num_cpus=_FAKE_CPUS, num_gpus=0, num_devices=1, device=device, num_engines_on_node=1)
