"""From an EngineSpec to vLLM: arguments, environment, precision, memory. Pure: it starts nothing."""

from peagle.engine.arguments import engine_args, max_num_batched_tokens, speculative_config
from peagle.engine.environment import environment, find_preload_libraries
from peagle.engine.memory import check_capacity, default_kv_cache_gib
from peagle.engine.precision import PRECISIONS, Precision, resolve_precision
from peagle.engine.sagemaker import from_sagemaker_env, to_sagemaker_env
from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS, DrafterSpec, DraftMethod, EngineSpec, LookupMethod

__all__ = [
    "DRAFT_METHODS",
    "LOOKUP_METHODS",
    "PRECISIONS",
    "DraftMethod",
    "DrafterSpec",
    "EngineSpec",
    "LookupMethod",
    "Precision",
    "check_capacity",
    "default_kv_cache_gib",
    "engine_args",
    "environment",
    "find_preload_libraries",
    "from_sagemaker_env",
    "max_num_batched_tokens",
    "resolve_precision",
    "speculative_config",
    "to_sagemaker_env",
]
