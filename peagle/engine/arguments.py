"""Translate an EngineSpec into vLLM's engine arguments.

Bulk, online and benchmarks share this drafter code.

Pure: a spec and a description of the hardware in, a dict out, by the names of vLLM 0.29's `EngineArgs`. It
starts nothing and imports no vLLM; the few facts about vLLM's scheduler that it rests on are cited where they
are used.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.engine.memory import default_kv_cache_gib
from peagle.engine.spec import DrafterSpec, EngineSpec, spec_precision
from peagle.errors import ConfigError
from peagle.hardware import Hardware

# What vLLM itself budgets for prefill in a step: `SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS` on CPU, and
# its default for data-centre GPUs (`EngineArgs.get_batch_defaults`).
_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}

MODALITIES = ("image", "audio", "video")
# vLLM takes an empty list of domains for any domain; nothing has a name under .invalid (RFC 2606).
_NO_DOMAIN = "none.invalid"
_DYNAMIC_K = "num_speculative_tokens_per_batch_size"
# Arguments that follow from the spec, and the field to set instead.
_MANAGED = (
    {
        "model": "model",
        "revision": "model",
        "tokenizer_revision": "model",
        "speculative_config": "drafter",
        "spec_method": "drafter",
        "spec_model": "drafter",
        "spec_tokens": "drafter",
        "dtype": "precision",
        "quantization": "precision",
        "kv_cache_dtype": "kv_cache_precision",
        "kv_cache_memory_bytes": "kv_cache_gib",
        "per_request_spec_decode_metrics": "drafter",
    }
    | {
        name: name
        for name in (
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "enforce_eager",
            "gpu_memory_utilization",
            "seed",
            "load_format",
            "enable_prefix_caching",
            "limit_mm_per_prompt",
            "allowed_media_domains",
        )
    }
    | {"language_model_only": "limit_mm_per_prompt"}
    | dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), "num_nodes")
)


def engine_args(
    spec: EngineSpec, hardware: Hardware, *, num_engines_on_node: int = 1, request_metrics: bool = True
) -> dict[str, Any]:
    """Keyword arguments for `vllm.AsyncEngineArgs` or `vllm.LLM`.

    None values are left to vLLM.

    Args:
        spec: the engine.
        hardware: the node that will run it.
        num_engines_on_node: engines that share the node's memory; on a GPU node each has accelerators of its
            own.
        request_metrics: ask for acceptance per request, which vLLM has from 0.29 on (0.24 rejects the
            argument).

    Raises:
        ConfigError: `spec.extra` sets what the spec manages, or vLLM's dynamic K.
        PrecisionError: the hardware cannot run `spec.precision`.
    """
    _check_extra(spec.extra)
    precision = spec_precision(spec, hardware)
    kv_cache_gib = spec.kv_cache_gib
    if kv_cache_gib is None and hardware.platform == "cpu":
        kv_cache_gib = default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "tokenizer_revision": spec.revision,
        "dtype": precision.dtype,
        "quantization": precision.quantization,
        "kv_cache_dtype": precision.kv_cache_dtype,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware),
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "pipeline_parallel_size": spec.pipeline_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        # Takes fractions and serves both platforms; the older VLLM_CPU_KVCACHE_SPACE knows whole GiB on CPU
        # only.
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 1024**3),
        "seed": spec.seed,
        "load_format": spec.load_format,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "speculative_config": _speculation(spec),
        **_media(spec),
        # vLLM refuses it without speculation (config/vllm.py).
        "per_request_spec_decode_metrics": "summary" if spec.drafter and request_metrics else None,
    }
    return {name: value for name, value in arguments.items() if value is not None} | dict(spec.extra)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The flags of `vllm serve` and `vllm run-batch` that say the same.

    >>> command_line({"model": "m", "max_num_seqs": 8, "enforce_eager": True, "seed": 0})
    ['--model', 'm', '--max-num-seqs', '8', '--enforce-eager', '--seed', '0']
    """
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return flags


def speculative_config(drafter: DrafterSpec | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`.

    P-EAGLE is its EAGLE-3 method with `parallel_drafting`.

    vLLM's dynamic K (`num_speculative_tokens_per_batch_size`) never stands beside it: parallel drafting lays
    its slots out for the largest K, so that only that K or 0 would be shape-correct, and nothing in vLLM
    guards it.
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
    if drafter.method == "suffix":
        # Only the request's own text: responses kept from earlier requests would be those to the very same prompts
        # wherever a measurement repeats them.
        config["suffix_decoding_max_cached_requests"] = 0
    if drafter.synthetic_rates:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(drafter.synthetic_rates)}
    return config


def _media(spec: EngineSpec) -> dict[str, Any]:
    """Text alone, or the media that were allowed.

    By default vLLM takes 999 of each, and fetches them from anywhere.
    """
    if not spec.limit_mm_per_prompt:
        return {"language_model_only": True}
    return {
        "limit_mm_per_prompt": {name: spec.limit_mm_per_prompt.get(name, 0) for name in MODALITIES},
        "allowed_media_domains": list(spec.allowed_media_domains) or [_NO_DOMAIN],
    }


def _speculation(spec: EngineSpec) -> dict[str, Any] | None:
    """The speculative config of an engine.

    A dummy target has a real head, where there are weights of one.

    What a head shares with its target, vLLM (0.24 to 0.29) learns from the names of the weights that it loads. A dummy
    head would be given the target's lm_head, which does not fit one with a draft vocabulary.
    """
    config, drafter = speculative_config(spec.drafter), spec.drafter
    if config is None or drafter is None or not drafter.has_head or spec.load_format != "dummy":
        return config
    folder = Path(drafter.model)
    has_weights = not folder.is_dir() or any(folder.glob("*.safetensors"))
    return config | ({"draft_load_config": {"load_format": "auto"}} if has_weights else {})


def max_num_batched_tokens(spec: EngineSpec, hardware: Hardware) -> int:
    """Token slots of one step: all decoding requests, and room for prefill.

    vLLM's scheduler (`v1/core/sched/scheduler.py`, `config/speculative.py: max_num_new_slots_for_drafting`)
    spends from `max_num_batched_tokens`, for each request that it puts into a step:

    - its scheduled tokens: while decoding 1 + K (the last token and the K drafts to verify), in prefill a
      piece of the prompt;
    - the drafter's extra input slots: K - 1 with parallel drafting (the first draft reuses an existing slot,
      the others are mask tokens), 0 with EAGLE-3. A request in prefill pays them too.

    With `max_num_seqs` = S decoding, P-EAGLE takes S x ((1 + K) + (K - 1)) = S x 2K, EAGLE-3 takes S x (1 +
    K) and no speculation takes S. The step keeps the prefill budget P (2048 on CPU, 8192 on a GPU) beyond
    that.

    Example: S = 256, K = 7, P-EAGLE: 256 x 14 = 3584 slots for decoding. Under vLLM's default of 2048 only
    146 of 256 requests could take part in a step, and prefill, served last, would never come; sized here on
    CPU it is 3584 + 2048 = 5632.
    """
    return _PREFILL_TOKENS[hardware.platform] + spec.max_num_seqs * slots_per_request(spec.drafter)


def check_slots(spec: EngineSpec) -> None:
    """Refuse token slots that leave prompts none.

    Decoding requests are served first, so no prompt would ever begin.

    Raises:
        ConfigError: with the number that is needed.
    """
    needed = spec.max_num_seqs * slots_per_request(spec.drafter)
    if spec.max_num_batched_tokens is not None and spec.max_num_batched_tokens <= needed:
        drafts = f", each with {spec.drafter.num_speculative_tokens} drafts" if spec.drafter else ""
        raise ConfigError(
            f"max_num_batched_tokens {spec.max_num_batched_tokens} leaves no room for prompts: {spec.max_num_seqs} "
            f"requests at once{drafts}, take {needed} token slots of a step",
            hint=f"give more than {needed}, or none, or fewer requests at once with --max-num-seqs",
        )


def slots_per_request(drafter: DrafterSpec | None) -> int:
    """Token slots of a step for one decoding request (`max_num_batched_tokens`)."""
    if drafter is None:
        return 1
    k = drafter.num_speculative_tokens
    return 2 * k if drafter.method == "peagle" else 1 + k


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse arguments that the spec manages.

    Set twice, one of the two would be silently lost.
    """
    if _DYNAMIC_K in json.dumps(extra, default=str):
        raise ConfigError(
            f"{_DYNAMIC_K} cannot be combined with parallel drafting: the drafter's slots are laid out"
            " for one K, and vLLM computes wrong drafts for any other without saying so",
            hint="choose one K for your concurrency with --num-speculative-tokens",
        )
    for name in extra:
        if name in _MANAGED:
            raise ConfigError(
                f"extra engine argument {name!r} is managed by peagle", hint=f"set {_MANAGED[name]!r} instead"
            )
