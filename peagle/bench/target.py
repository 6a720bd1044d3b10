"""The target of a measurement: engine without a drafter, fingerprint, notes.

It starts nothing. What varies (drafters, K, concurrency) is each command's own.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

from peagle.bench.options import MeasurementKeys
from peagle.bench.prompts import Dataset
from peagle.catalog.targets import ResolvedModel, max_model_len
from peagle.engine.precision import Precision
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware
from peagle.provenance import versions

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def target_spec(config: MeasurementKeys, model: ResolvedModel, *, max_num_seqs: int, **own: Any) -> EngineSpec:
    """The engine that a configuration asks for.

    `own` are fields of it that a command sets itself.

    Raises:
        ConfigError: the context is longer than the model's.
    """
    return EngineSpec(
        model=model.path,
        revision=model.revision,
        precision=config.precision,
        native_quantization=model.native_quantization,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len(model, config.max_model_len),
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=config.enforce_eager,
        kv_cache_gib=config.kv_cache_gib,
        gpu_memory_utilization=config.gpu_memory_utilization,
        **own,
    )


def target_fingerprint(
    config: MeasurementKeys,
    model: ResolvedModel,
    spec: EngineSpec,
    precision: Precision,
    hardware: Hardware,
    dataset: Dataset,
) -> dict[str, Any]:
    """The settings that all measurements of one folder share; JSON-ready."""
    # Named only where it was chosen, so that folders from before it was named go on.
    runner = chosen_model_runner()
    return {
        "model": {"name": model.name, "weights": model.fingerprint},
        "precision": precision.describe(),
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "kv_cache_gib": spec.kv_cache_gib,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "sampling": config.sampling(),
        "dataset": {"content": dataset.fingerprint, "prompts": dataset.spec.to_dict()},
        "hardware": hardware.describe(),
        "versions": {name: found for name, found in versions().items() if name.startswith("vllm")},
    } | ({MODEL_RUNNER: runner} if runner else {})


def chosen_model_runner() -> str | None:
    """The user's setting of `VLLM_USE_V2_MODEL_RUNNER`.

    None where vLLM chooses a model runner by itself.
    """
    return os.environ.get(MODEL_RUNNER) or None


def announce(
    say: Callable[[str], None],
    dataset: Dataset,
    model: ResolvedModel,
    precision: Precision,
    hardware: Hardware,
    notes: Iterable[str],
) -> None:
    """Say what will be measured, on what, and which rows of the data cannot be."""
    where = f"{hardware.describe()}, {precision.describe()}"
    say(f"{len(dataset.prompts)} prompts of {dataset.name}; {model.name} on {where}")
    for note in notes:
        say(f"  {note}")
    for reason, count in dataset.rejected.items():
        say(f"  {count} rows give no prompt: {reason}")
