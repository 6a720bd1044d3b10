"""vLLM arguments that users cannot set, because peagle manages them."""

import json
from collections.abc import Mapping
from typing import Any

from peagle.errors import ConfigError

_DYNAMIC_K = "num_speculative_tokens_per_batch_size"
# Arguments that are derived from the spec, and the field to set instead.
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
    | {"language_model_only": "limit_mm_per_prompt", "allowed_local_media_path": "allowed_media_domains"}
    | dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"), "num_nodes")
)
# Arguments that would break a promise, and why.
_REFUSED = {
    "trust_remote_code": "code in a model's folder never runs",
    "tokenizer": "prompts are prepared with the target's own tokenizer",
    "tokenizer_mode": "prompts are prepared with the target's own tokenizer",
    "skip_tokenizer_init": "responses are text",
    "served_model_name": "the endpoint names its models with --name",
    "generation_config": "sampling defaults must be the same in a batch and online",
    "override_generation_config": "sampling defaults must be the same in a batch and online",
    "structured_outputs_config": "every grammar is tried with one back end before it reaches an engine",
    "reasoning_parser": "the endpoint has --reasoning-parser",
    "disable_log_stats": "an engine's steps show that it is alive",
    "runner": "engines generate text",
    "convert": "engines generate text",
}


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse arguments that peagle manages.

    Raises:
        ConfigError: names the argument, and what to set instead or the reason.
    """
    if _DYNAMIC_K in json.dumps(extra, default=str):
        raise ConfigError(
            f"{_DYNAMIC_K} cannot be combined with parallel drafting: the drafter's slots are laid out"
            " for one K, and vLLM silently computes wrong drafts for any other K",
            hint="choose a K for your concurrency with --num-speculative-tokens",
        )
    for name in extra:
        if name in _MANAGED:
            raise ConfigError(
                f"extra engine argument {name!r} is managed by peagle", hint=f"set {_MANAGED[name]!r} instead"
            )
        if name in _REFUSED:
            raise ConfigError(f"extra engine argument {name!r} is refused: {_REFUSED[name]}")
        if name.startswith("data_parallel_"):
            raise ConfigError(
                f"extra engine argument {name!r} is refused: Ray divides requests among engines",
                hint="use --engines in a bulk run, --max-replicas for the endpoint",
            )
