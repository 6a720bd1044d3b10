"""The engine options that all commands share.

`engine_args` accepts all other arguments of vLLM. Their names are checked against the installed vLLM before an engine
or a node is requested. vLLM checks their values when it starts.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from peagle.engine.arguments import check_extra
from peagle.engine.precision import Precision, PrecisionName
from peagle.engine.spec import DrafterSpec, Verify
from peagle.errors import ConfigError, did_you_mean
from peagle.hardware import Hardware
from peagle.key_values import parse_pairs

CachePrecision = Literal["auto", "bf16", "fp8"]
DraftLookup = Literal["auto", "on", "off"]


class TargetOptions(BaseModel):
    """The engine options that all commands share. Descriptions are the help texts of the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(
        "smollm2-135m", description="target model: catalog name, folder (local or s3://), or Hugging Face id"
    )
    precision: PrecisionName = Field("auto", description="weights and KV cache of the target")
    kv_cache_precision: CachePrecision = Field(
        "auto",
        description="precision of the KV cache; auto: like --precision, but fp8 if contexts are long enough to benefit",
    )
    max_model_len: int | None = Field(None, ge=16, description="context in tokens; default: the model's own")
    tensor_parallel_size: int = Field(1, ge=1, description="accelerators that share each layer of one engine")
    enforce_eager: bool = Field(
        False,
        description="do not compile: starts sooner, decodes slower; default for short bulk runs and endpoints on CPUs,"
        " unless compiled code exists",
    )
    kv_cache_gib: float | None = Field(
        None, gt=0, description="memory of the KV cache on CPU; default: from the machine's memory"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of an accelerator's memory to use")
    draft_kv_cache_precision: CachePrecision = Field(
        "auto", description="precision of the drafter's own KV cache; auto: the target's"
    )
    draft_attention_backend: str | None = Field(
        None, min_length=1, description="vLLM's name of the drafter's attention back end; default: vLLM's choice"
    )
    draft_lookup: DraftLookup = Field(
        "auto",
        description="prompt lookup in addition to the head: copy later drafts from an earlier occurrence in the"
        " request's text; auto: off until benchmarks show a gain for all texts",
    )
    verify: Verify = Field(
        "all",
        description="all: verify every draft; auto: those that are worth their time at the current load, possibly none"
        " (CPUs, and DSpark on GPUs)",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="another argument of vLLM's engine, as JSON or text; may be repeated; a map in YAML",
        json_schema_extra={"flag": "engine-arg", "metavar": "KEY=VALUE"},
    )

    @field_validator("engine_args", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        return parse_arguments(value) if isinstance(value, list) else value

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            check_extra({name: value for name, value in arguments.items() if name not in SPEC_FIELDS})
        except ConfigError as error:
            raise ValueError(f"{error.message}; {error.hint}" if error.hint else error.message) from error
        return arguments


# The options above, except the model and its precisions.
TARGET_ENGINE_OPTIONS = tuple(
    name for name in TargetOptions.model_fields if name not in ("model", "precision", "kv_cache_precision")
)
DRAFTER_KEYS = ("draft_kv_cache_precision", "draft_attention_backend", "draft_lookup", "verify")
# Fields of an EngineSpec without an option; benchmarks set them.
SPEC_FIELDS = ("load_format", "seed", "enable_prefix_caching")


def parse_arguments(pairs: list[Any]) -> dict[str, Any]:
    """Parse arguments from KEY=VALUE. A value is JSON if possible, otherwise text; a key may have hyphens.

    >>> parse_arguments(["block-size=32", "moe_backend=triton", "async_scheduling=false"])
    {'block_size': 32, 'moe_backend': 'triton', 'async_scheduling': False}
    """
    arguments: dict[str, Any] = {}
    for name, text in parse_pairs(pairs, spelling=lambda key: key.replace("-", "_")).items():
        try:
            arguments[name] = json.loads(text)
        except ValueError:
            arguments[name] = text
    return arguments


def extra_arguments(
    options: TargetOptions, precision: Precision, config: Mapping[str, Any], *, on_gpu: bool
) -> dict[str, Any]:
    """Return an engine's `EngineSpec.extra`: the user's arguments, and those that an FP8 KV cache needs.

    Args:
        config: the target's `config.json`.

    Raises:
        ConfigError: vLLM has no such argument.
    """
    if options.engine_args:
        check_argument_names(options.engine_args)
    text_config = config.get("text_config") or config
    extra: dict[str, Any] = {}
    # In a sliding window, FP8 saves little memory and costs as much time as elsewhere (vLLM blog, 2026-04-22).
    if on_gpu and precision.kv_cache == "fp8" and "sliding_attention" in (text_config.get("layer_types") or ()):
        extra["kv_cache_dtype_skip_layers"] = ["sliding_window"]
    return extra | {name: value for name, value in options.engine_args.items() if name not in SPEC_FIELDS}


def widest_head_dim(config: Mapping[str, Any]) -> int:
    """Return the dimension of a target's widest attention heads; 0 if unknown."""
    text_config = config.get("text_config") or config
    return max(text_config.get("head_dim") or 0, text_config.get("global_head_dim") or 0)


def spec_fields(options: TargetOptions) -> dict[str, Any]:
    """Return the `engine_args` that are fields of an EngineSpec."""
    return {name: value for name, value in options.engine_args.items() if name in SPEC_FIELDS}


def check_argument_names(arguments: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a name that the installed vLLM does not have."""
    from vllm import AsyncEngineArgs

    known_names = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in arguments:
        if name not in known_names:
            raise ConfigError(f"vLLM has no engine argument {name!r}", hint=did_you_mean(name, known_names))


def apply_drafter_options(drafter: DrafterSpec, options: TargetOptions, hardware: Hardware) -> DrafterSpec:
    """Return the drafter with its KV cache, attention, lookup and verification options; unchanged without a head.

    Raises:
        ConfigError: the lookup is not supported on this hardware.
    """
    if not drafter.has_head:
        return drafter
    lookup = options.draft_lookup == "on"
    # With asynchronous scheduling, which CPUs do not have, vLLM keeps drafts on the GPU from step to step (0.29).
    if lookup and hardware.platform == "cuda" and options.engine_args.get("async_scheduling") is not False:
        raise ConfigError(
            "prompt lookup does not work with vLLM's asynchronous scheduling, the default on GPUs",
            hint="add --engine-arg async_scheduling=false, which costs time in each step, or remove --draft-lookup",
        )
    # vLLM does not support bidirectional attention with an FP8 cache (vllm-project/vllm issue 41559).
    needs_bf16 = drafter.drafts_block and hardware.platform == "cuda" and options.draft_kv_cache_precision == "auto"
    return replace(
        drafter,
        kv_cache_precision="bf16" if needs_bf16 else options.draft_kv_cache_precision,
        attention_backend=options.draft_attention_backend and options.draft_attention_backend.upper(),
        lookup=lookup,
        verify=verify_for(drafter.method, options, hardware),
    )


def verify_for(method: str, options: TargetOptions, hardware: Hardware) -> Verify:
    """Return which drafts of a method an engine verifies on this hardware."""
    # On GPUs, drafts stay on the device. There, only DSpark's own runner can drop drafts, and only if the user sets
    # `verify`.
    is_dspark_with_verify = method == "dspark" and "verify" in options.model_fields_set
    can_verify_some = hardware.platform == "cpu" or is_dspark_with_verify
    return options.verify if can_verify_some else "all"


def drafter_note(drafter: DrafterSpec | None) -> str:
    """Return a suffix for a note about a drafter: the effects of its options and method, or an empty string."""
    if drafter is None:
        return ""
    lookup = "; with prompt lookup" if drafter.lookup else ""
    return lookup + ("; without prefix caching, which would spoil its drafts" if drafter.drafts_block else "")


def non_default_options(options: TargetOptions) -> dict[str, Any]:
    """Return drafter options and `engine_args` with other values than the default, for a measurement's fingerprint."""
    names = (*DRAFTER_KEYS, "engine_args")
    defaults = {name: TargetOptions.model_fields[name].get_default(call_default_factory=True) for name in names}
    return {name: value for name in names if (value := getattr(options, name)) != defaults[name]}
