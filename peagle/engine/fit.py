"""Memory of an engine in words, by the estimate that refuses what cannot fit."""

from peagle.engine.memory import Footprint, default_kv_cache_gib, gpu_need, read_footprint
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware


def memory_in_words(
    spec: EngineSpec, hardware: Hardware, known: Footprint | None, *, num_engines_on_node: int = 1
) -> str:
    """The memory of an engine that `check_capacity` has let pass.

    Args:
        spec: its model by its folder, if it is on this disk.
        known: the footprint of a model that is not.
    """
    footprint = read_footprint(spec.model) or known
    if footprint is None:
        return "not known: config.json does not say enough"
    if hardware.platform == "cpu":
        cache_gib = spec.kv_cache_gib or default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
        return f"fits by estimate, with a KV cache of {cache_gib:.1f} GiB; {hardware.free_memory_gib:.1f} GiB are free"
    need = gpu_need(spec, hardware, footprint)
    return (
        f"about {need.total_gib:.1f} of {need.available_gib:.1f} GiB (weights {need.weights_gib:.1f}, KV cache of one "
        f"request {need.kv_cache_gib:.1f}, a step {need.step_gib:.1f}, CUDA graphs {need.graphs_gib:.1f})"
    )
