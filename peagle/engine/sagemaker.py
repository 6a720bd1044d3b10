"""SageMaker JumpStart's drafter settings: JSON in SM_VLLM_SPECULATIVE_CONFIG.

Reading and writing it lets one configuration move between a JumpStart endpoint and peagle unchanged. Other
`SM_VLLM_*` variables are plain vLLM flags and are not read.
"""

import json
from collections.abc import Mapping
from typing import Any

from peagle.engine.arguments import DRAFT_CACHE, speculative_config
from peagle.engine.spec import DrafterSpec
from peagle.errors import ConfigError, did_you_mean

VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"
_KEYS = (
    "method",
    "model",
    "revision",
    "num_speculative_tokens",
    "parallel_drafting",
    "use_local_argmax_reduction",  # it changes no draft: peagle always sets it
    "kv_cache_dtype",
    "attention_backend",
)
_CACHE_PRECISIONS = {dtype: name for name, dtype in DRAFT_CACHE.items()}


def from_sagemaker_env(env: Mapping[str, str]) -> DrafterSpec | None:
    """The drafter named in `env`, None where the variable is unset or empty.

    Raises:
        ConfigError: not a JSON object, a key or method that peagle does not carry, or a key missing.
    """
    text = env.get(VARIABLE, "").strip()
    if not text:
        return None
    config = _parse(text)
    if config.get("method", "eagle3") != "eagle3":
        raise ConfigError(
            f"{VARIABLE}: method {config['method']!r} is not one that peagle carries",
            hint='P-EAGLE is "method": "eagle3" with "parallel_drafting": true; EAGLE-3 the same without it',
        )
    is_parallel = config.get("parallel_drafting", False)
    if not isinstance(is_parallel, bool):
        raise ConfigError(f"{VARIABLE}: parallel_drafting must be true or false, not {is_parallel!r}")
    k = config["num_speculative_tokens"]
    if not isinstance(k, int) or isinstance(k, bool):
        raise ConfigError(f"{VARIABLE}: num_speculative_tokens must be a whole number, not {k!r}")
    if not isinstance(config["model"], str):
        raise ConfigError(f"{VARIABLE}: model must be text, not {config['model']!r}")
    if not isinstance(revision := config.get("revision"), str | None):
        raise ConfigError(f"{VARIABLE}: revision must be text, not {revision!r}")
    if (cache := config.get("kv_cache_dtype")) not in _CACHE_PRECISIONS:
        raise ConfigError(f"{VARIABLE}: kv_cache_dtype {cache!r} is not one that peagle carries")
    if not isinstance(backend := config.get("attention_backend"), str | None):
        raise ConfigError(f"{VARIABLE}: attention_backend must be text, not {backend!r}")
    return DrafterSpec(
        method="peagle" if is_parallel else "eagle3",
        model=config["model"],
        num_speculative_tokens=k,
        revision=revision,
        kv_cache_precision=_CACHE_PRECISIONS[cache],
        attention_backend=backend,
    )


def to_sagemaker_env(drafter: DrafterSpec | None) -> dict[str, str]:
    """The variable that makes a JumpStart endpoint draft the same way.

    Empty without a drafter.
    """
    config = speculative_config(drafter)
    return {VARIABLE: json.dumps(config)} if config else {}


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{VARIABLE} must be a JSON object, not {type(config).__name__}")
    for key in config:
        if key not in _KEYS:
            raise ConfigError(f"{VARIABLE}: unknown key {key!r}", hint=did_you_mean(key, _KEYS))
    if missing := [key for key in ("model", "num_speculative_tokens") if key not in config]:
        raise ConfigError(f"{VARIABLE} lacks {', '.join(missing)}")
    return config
