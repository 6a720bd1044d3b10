"""Translate an EngineSpec into the arguments of vLLM 0.29's `EngineArgs`, for all uses of an engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peagle.engine.attention import draft_backend, target_backend
from peagle.engine.memory import default_kv_cache_gib
from peagle.engine.spec import DrafterSpec, EngineSpec, spec_precision
from peagle.engine.steps import capture_sizes, max_num_batched_tokens
from peagle.errors import ConfigError
from peagle.hardware import Hardware

MODALITIES = ("image", "audio", "video")
# For vLLM, an empty list of domains allows every domain. No host has this name: RFC 2606 reserves .invalid.
_NO_DOMAIN = "none.invalid"
_QUANTIZATION = {None: None, "fp8": "fp8", "int8": "compressed-tensors"}
# vLLM's names for the precision of a drafter's KV cache.
DRAFT_KV_CACHE_DTYPES = {"auto": None, "bf16": "bfloat16", "fp8": "fp8"}
_DYNAMIC_K = "num_speculative_tokens_per_batch_size"
# Fields of the spec that vLLM does not have, or has under another name.
_PEAGLE_FIELDS = {
    *("drafter", "extra", "num_nodes"),
    *("precision", "kv_cache_precision", "native_quantization", "kv_cache_gib"),
}
# Arguments of vLLM that are derived from the spec, and the field of the spec to set instead.
_MANAGED = {
    **{field.name: field.name for field in fields(EngineSpec) if field.name not in _PEAGLE_FIELDS},
    **dict.fromkeys(("revision", "tokenizer_revision"), "model"),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "drafter"),
    "per_request_spec_decode_metrics": "drafter",
    **dict.fromkeys(("dtype", "quantization"), "precision"),
    "kv_cache_dtype": "kv_cache_precision",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "language_model_only": "limit_mm_per_prompt",
    "allowed_local_media_path": "allowed_media_domains",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"), "num_nodes"),
}
# Arguments of vLLM that would break one of peagle's guarantees, and why.
_REFUSED = {
    "trust_remote_code": "code in a model's folder never runs",
    "tokenizer": "prompts are prepared with the target's own tokenizer",
    "tokenizer_mode": "prompts are prepared with the target's own tokenizer",
    "skip_tokenizer_init": "peagle's engines return text",
    "served_model_name": "the endpoint names its models with --name",
    "generation_config": "sampling defaults must be the same in a batch and online",
    "override_generation_config": "sampling defaults must be the same in a batch and online",
    "structured_outputs_config": "peagle tests each grammar before an engine compiles it, with a fixed back end",
    "reasoning_parser": "the endpoint has --reasoning-parser",
    "disable_log_stats": "peagle counts an engine's steps to detect a hang",
    "runner": "peagle's engines only generate text",
    "convert": "peagle's engines only generate text",
}


def engine_args(
    spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1, request_metrics: bool = True
) -> dict[str, Any]:
    """Return keyword arguments for `vllm.AsyncEngineArgs` or `vllm.LLM`. For all others, vLLM has defaults.

    Args:
        num_engines_on_node: engines that share the node's memory; on a GPU node, each has its own accelerators.
        request_metrics: report acceptance per request; must be False for vLLM 0.24, which rejects the argument.

    Raises:
        ConfigError: `spec.extra` has an argument that `check_extra` refuses.
        PrecisionError: the hardware cannot run `spec.precision`.
    """
    check_extra(spec.extra)
    precision = spec_precision(spec, hardware)
    kv_cache_dtype: str = precision.kv_cache_dtype
    # For a checkpoint with `kv_cache_scheme`, vLLM's "auto" means FP8, even if bf16 was requested. On CPUs, vLLM has no
    # other name for bf16.
    if hardware.platform == "cuda" and precision.native_quantization is not None and kv_cache_dtype == "auto":
        kv_cache_dtype = precision.dtype
    kv_cache_gib = spec.kv_cache_gib
    if kv_cache_gib is None and hardware.platform == "cpu":
        kv_cache_gib = default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "tokenizer_revision": spec.revision,
        "dtype": precision.dtype,
        "quantization": _QUANTIZATION[precision.quantization],
        "kv_cache_dtype": kv_cache_dtype,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware),
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "pipeline_parallel_size": spec.pipeline_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        # VLLM_CPU_KVCACHE_SPACE takes only whole GiB and works only on CPUs.
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 1024**3),
        "seed": spec.seed,
        "load_format": spec.load_format,
        "enable_prefix_caching": spec.caches_prefixes,
        "cudagraph_capture_sizes": capture_sizes(spec, hardware),
        "attention_backend": target_backend(spec, hardware),
        "speculative_config": _engine_speculative_config(spec, hardware),
        # vLLM refuses this argument without speculation (config/vllm.py).
        "per_request_spec_decode_metrics": "summary" if spec.drafter and request_metrics else None,
    }
    # By default vLLM accepts 999 media of each kind from any host.
    if spec.limit_mm_per_prompt:
        arguments["limit_mm_per_prompt"] = {name: spec.limit_mm_per_prompt.get(name, 0) for name in MODALITIES}
        arguments["allowed_media_domains"] = list(spec.allowed_media_domains) or [_NO_DOMAIN]
    else:
        arguments["language_model_only"] = True
    return {name: value for name, value in arguments.items() if value is not None} | dict(spec.extra)


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise a ConfigError for vLLM arguments that peagle manages or refuses, such as dynamic K."""
    if _DYNAMIC_K in json.dumps(extra, default=str):
        raise ConfigError(
            f"{_DYNAMIC_K} cannot be combined with parallel drafting: the drafter's slots are laid out"
            " for one K, and vLLM silently computes wrong drafts for any other K",
            hint="choose a K for your concurrency with --num-speculative-tokens",
        )
    for name in extra:
        if name in _MANAGED:
            raise ConfigError(
                f"extra engine argument {name!r} is managed by peagle", hint=f"set peagle's {_MANAGED[name]!r} instead"
            )
        if name in _REFUSED:
            raise ConfigError(f"extra engine argument {name!r} is refused: {_REFUSED[name]}")
        if name.startswith("data_parallel_"):
            raise ConfigError(
                f"extra engine argument {name!r} is refused: Ray divides requests among engines",
                hint="use --engines for a bulk run, or --max-replicas for an endpoint",
            )


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
    the largest K. Other values of K would have wrong shapes, which vLLM does not check.
    """
    if drafter is None:
        return None
    config: dict[str, Any] = {
        "method": "eagle3" if drafter.method == "peagle" else drafter.method,
        **({"model": drafter.model} if drafter.has_head else {}),
        "num_speculative_tokens": drafter.num_speculative_tokens,
    }
    if drafter.revision is not None:
        config["revision"] = drafter.revision
    if drafter.method == "peagle":
        config["parallel_drafting"] = True
    if drafter.method in ("peagle", "eagle3"):
        # A draft is its logits' argmax (`draft_sample_method` is greedy). Without this option, vLLM first scatters the
        # logits of a draft vocabulary into the target's, and gathers all logits from all ranks: 0.64 ms of a step
        # instead of 0.04 (K=5, one request; 8,192 of 49,152 tokens; 2 cores of an AMD EPYC, 2026-11-25). In vLLM 0.29,
        # all classes for EAGLE-3 and P-EAGLE heads support the option; the DFlash classes do not.
        config["use_local_argmax_reduction"] = True
    if drafter.method == "dspark" and drafter.verify == "auto":
        config["enable_adaptive_verification"] = True
    if (cache := DRAFT_KV_CACHE_DTYPES[drafter.kv_cache_precision]) is not None:
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


def _engine_speculative_config(spec: EngineSpec, hardware: Hardware) -> dict[str, Any] | None:
    """Return the speculative config of an engine on its hardware.

    If the target has dummy weights, the head's real weights are loaded nevertheless, if they exist. vLLM (0.24 to 0.29)
    finds out from the names of loaded weights what a head shares with its target. So a dummy head would get the
    target's lm_head, which does not fit a draft vocabulary.
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
    """The place of one node in an engine that spans several nodes.

    vLLM receives and schedules requests on the first node, the leader. The other nodes run their ranks until these end
    (`vllm_internals.follow`).

    Attributes:
        number: 0 for the leader.
        host: this node's address for the other nodes.
        leader: the leader's address and a free port there.
    """

    number: int
    host: str
    leader: tuple[str, int]

    def arguments(self, num_nodes: int) -> dict[str, Any]:
        """Return additional `engine_args`. Each node starts its own ranks: vLLM 0.29's Ray executor cannot use CPUs."""
        address, port = self.leader
        return {
            "distributed_executor_backend": "mp",
            "nnodes": num_nodes,
            "node_rank": self.number,
            "master_addr": address,
            "master_port": port,
        }

    def environment(self) -> dict[str, str]:
        """Return this node's address as a variable, since vLLM would guess it from a route to the internet."""
        return {"VLLM_HOST_IP": self.host}
