"""Translate an EngineSpec into vLLM's engine arguments, for bulk, online and benchmarks. Pure functions.

The names are those of vLLM 0.29's `EngineArgs`. An engine may have ranks on several nodes (`NodeRank`). The first node
leads: vLLM receives and schedules requests there. The others follow until their ranks end (`vllm_internals.follow`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.engine.attention import draft_backend, target_backend
from peagle.engine.extra import check_extra
from peagle.engine.memory import default_kv_cache_gib
from peagle.engine.precision import Precision
from peagle.engine.spec import DrafterSpec, EngineSpec, spec_precision
from peagle.engine.steps import capture_sizes, max_num_batched_tokens
from peagle.hardware import Hardware

MODALITIES = ("image", "audio", "video")
# vLLM takes an empty list of domains for any domain; nothing has a name under .invalid (RFC 2606).
_NO_DOMAIN = "none.invalid"
_QUANTIZATION = {None: None, "fp8": "fp8", "int8": "compressed-tensors"}
DRAFT_CACHE = {"auto": None, "bf16": "bfloat16", "fp8": "fp8"}


def engine_args(
    spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1, request_metrics: bool = True
) -> dict[str, Any]:
    """Return keyword arguments for `vllm.AsyncEngineArgs` or `vllm.LLM`. None leaves the choice to vLLM.

    Args:
        hardware: the node that will run the engine.
        num_engines_on_node: engines that share the node's memory; on a GPU node, each has its own accelerators.
        request_metrics: report acceptance per request, which vLLM 0.29 introduced (0.24 rejects the argument).

    Raises:
        ConfigError: `spec.extra` sets what the spec manages, or vLLM's dynamic K.
        PrecisionError: the hardware cannot run `spec.precision`.
    """
    check_extra(spec.extra)
    precision = spec_precision(spec, hardware)
    kv_cache_gib = spec.kv_cache_gib
    if kv_cache_gib is None and hardware.platform == "cpu":
        kv_cache_gib = default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "tokenizer_revision": spec.revision,
        "dtype": precision.dtype,
        "quantization": _QUANTIZATION[precision.quantization],
        "kv_cache_dtype": _kv_cache_dtype(precision, hardware),
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware),
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "pipeline_parallel_size": spec.pipeline_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        # Takes fractions and works on both platforms; the older VLLM_CPU_KVCACHE_SPACE takes whole GiB on CPU
        # only.
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 1024**3),
        "seed": spec.seed,
        "load_format": spec.load_format,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "cudagraph_capture_sizes": capture_sizes(spec, hardware),
        "attention_backend": target_backend(spec, hardware),
        "speculative_config": _speculation(spec, hardware),
        **_media(spec),
        # vLLM refuses it without speculation (config/vllm.py).
        "per_request_spec_decode_metrics": "summary" if spec.drafter and request_metrics else None,
    }
    return {name: value for name, value in arguments.items() if value is not None} | dict(spec.extra)


def _kv_cache_dtype(precision: Precision, hardware: Hardware) -> str:
    """Return vLLM's name for the KV cache's format.

    For a checkpoint with `kv_cache_scheme`, vLLM's "auto" means FP8, even if bf16 was requested. So bf16 is named
    explicitly for quantised checkpoints. On CPUs it has no name.
    """
    is_named = hardware.platform == "cuda" and precision.native_quantization is not None
    return precision.dtype if is_named and precision.kv_cache_dtype == "auto" else precision.kv_cache_dtype


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return the equivalent flags of `vllm serve` and `vllm run-batch`.

    >>> command_line({"model": "m", "max_num_seqs": 8, "enforce_eager": True, "seed": 0})
    ['--model', 'm', '--max-num-seqs', '8', '--enforce-eager', '--seed', '0']
    """
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def speculative_config(drafter: DrafterSpec | None) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config`. To vLLM, P-EAGLE is EAGLE-3 with `parallel_drafting`.

    vLLM's dynamic K (`num_speculative_tokens_per_batch_size`) is never set: parallel drafting lays out its slots for
    the largest K, so other values of K have wrong shapes, which vLLM does not check.
    """
    if drafter is None:
        return None
    config: dict[str, Any] = {
        "method": "eagle3" if drafter.has_head else drafter.method,
        **({"model": drafter.model} if drafter.has_head else {}),
        "num_speculative_tokens": drafter.num_speculative_tokens,
    }
    if drafter.revision is not None:
        config["revision"] = drafter.revision
    if drafter.method == "peagle":
        config["parallel_drafting"] = True
    if drafter.has_head:
        # A draft is its logits' argmax (`draft_sample_method` is greedy). Without this vLLM scatters the logits of a
        # draft vocabulary into the target's first, and gathers them whole from all ranks: 0.64 ms of a step against
        # 0.04 (K=5, one request; 8,192 of 49,152 tokens; 2 cores of an AMD EPYC, 2026-11-25). Each class that vLLM
        # loads for an EAGLE-3 or P-EAGLE head can do it (0.29).
        config["use_local_argmax_reduction"] = True
    if (cache := DRAFT_CACHE[drafter.kv_cache_precision]) is not None:
        config["kv_cache_dtype"] = cache
    if drafter.attention_backend is not None:
        config["attention_backend"] = drafter.attention_backend
    if drafter.method == "suffix":
        # Look up only the request's own text: if a measurement repeats prompts, the cache of earlier responses would
        # contain the responses to the same prompts.
        config["suffix_decoding_max_cached_requests"] = 0
    if drafter.synthetic_rates:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(drafter.synthetic_rates)}
    return config


def _media(spec: EngineSpec) -> dict[str, Any]:
    """Return the limits on media: text only, or the allowed media.

    By default vLLM accepts 999 of each kind from any host.
    """
    if not spec.limit_mm_per_prompt:
        return {"language_model_only": True}
    return {
        "limit_mm_per_prompt": {name: spec.limit_mm_per_prompt.get(name, 0) for name in MODALITIES},
        "allowed_media_domains": list(spec.allowed_media_domains) or [_NO_DOMAIN],
    }


def _speculation(spec: EngineSpec, hardware: Hardware) -> dict[str, Any] | None:
    """Return the speculative config of an engine on its hardware.

    A target with dummy weights gets a real head if its weights exist. vLLM (0.24 to 0.29) learns from the names of
    loaded weights what a head shares with its target, so a dummy head would get the target's lm_head, which does not
    fit a draft vocabulary.
    """
    config, drafter = speculative_config(spec.drafter), spec.drafter
    if config is not None and (backend := draft_backend(spec, hardware)) is not None:
        config["attention_backend"] = backend
    if config is None or drafter is None or not drafter.has_head or spec.load_format != "dummy":
        return config
    folder = Path(drafter.model)
    has_weights = not folder.is_dir() or any(folder.glob("*.safetensors"))
    return config | ({"draft_load_config": {"load_format": "auto"}} if has_weights else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRank:
    """A node's rank in an engine.

    Attributes:
        number: 0 for the leader.
        host: this node's address for the other nodes.
        leader: the leader's address and a free port there.
    """

    number: int
    host: str
    leader: tuple[str, int]

    def arguments(self, num_nodes: int) -> dict[str, Any]:
        """Return additional `engine_args`: each node starts its own ranks (vLLM 0.29's Ray executor lacks CPUs)."""
        address, port = self.leader
        return {
            "distributed_executor_backend": "mp",
            "nnodes": num_nodes,
            "node_rank": self.number,
            "master_addr": address,
            "master_port": port,
        }

    def environment(self) -> dict[str, str]:
        """Return additional variables. Without them, vLLM guesses the address from a route to the internet."""
        return {"VLLM_HOST_IP": self.host}
