"""The specification of an engine, shared by bulk runs, endpoints and benchmarks, and stored with their results."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from peagle.engine.precision import KV_CACHE_PRECISIONS, PRECISIONS, Precision, resolve_precision
from peagle.errors import ConfigError, did_you_mean
from peagle.hardware import Hardware

DraftMethod = Literal["peagle", "eagle3", "dflash", "dspark"]
BLOCK_METHODS = ("dflash", "dspark")
DRAFT_METHODS: tuple[str, ...] = get_args(DraftMethod)
LookupMethod = Literal["ngram", "suffix"]  # drafts from n-grams of the prompt and the response, without a head
LOOKUP_METHODS: tuple[str, ...] = get_args(LookupMethod)
Verify = Literal["auto", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """A drafter.

    Attributes:
        method: "peagle", "dflash" and "dspark" draft all K tokens in one pass of their head, "eagle3" one token after
            another; "ngram" and "suffix" have no head and copy from earlier tokens of the request.
        model: the head's folder (local or s3://) or hub id; empty without a head.
        num_speculative_tokens: K.
        synthetic_rates: by position, the rate at which drafts are accepted at random, to measure hardware; the text
            is meaningless.
        kv_cache_precision: precision of the head's KV cache; "auto" is the target's.
        attention_backend: vLLM's name of the head's attention back end; None if vLLM chooses.
        lookup: whether drafts after the head's first ones are copied from earlier text of the request (`lookup.py`).
        verify: "auto" verifies the drafts that are worth their time (`verification.py`), "all" every draft.
    """

    method: DraftMethod | LookupMethod
    model: str
    num_speculative_tokens: int
    synthetic_rates: tuple[float, ...] | None = None
    revision: str | None = None
    kv_cache_precision: str = "auto"
    attention_backend: str | None = None
    lookup: bool = False
    verify: Verify = "all"

    def __post_init__(self) -> None:
        methods = DRAFT_METHODS + LOOKUP_METHODS
        if self.method not in methods:
            raise ConfigError(f"unknown draft method {self.method!r}", hint=did_you_mean(self.method, methods))
        if self.has_head and not self.model:
            raise ConfigError("a drafter requires a model: a folder or a hub id")
        if self.model and not self.has_head:
            raise ConfigError(f"{self.method} drafts without a head, but {self.model} was given")
        if self.kv_cache_precision not in KV_CACHE_PRECISIONS:
            hint = did_you_mean(self.kv_cache_precision, KV_CACHE_PRECISIONS)
            raise ConfigError(f"unknown precision {self.kv_cache_precision!r} of the drafter's KV cache", hint=hint)
        _require_positive("num_speculative_tokens", self.num_speculative_tokens)
        if self.synthetic_rates is not None:
            is_non_increasing = all(
                rate >= next_rate for rate, next_rate in pairwise((1.0, *self.synthetic_rates, 0.0))
            )
            if len(self.synthetic_rates) != self.num_speculative_tokens or not is_non_increasing:
                raise ConfigError(
                    f"synthetic rates must be {self.num_speculative_tokens} non-increasing shares from 0 to 1, not "
                    f"{list(self.synthetic_rates)}",
                    hint="drafts are accepted as a prefix, so no position can be accepted more often than the previous "
                    "one",
                )
        if self.lookup and not self.has_head:
            raise ConfigError(f"{self.method} is already a lookup method; draft_lookup requires a head")
        if self.lookup and self.synthetic_rates is not None:
            raise ConfigError("draft_lookup cannot be combined with synthetic acceptance", hint="remove --draft-lookup")

    @property
    def has_head(self) -> bool:
        """Whether the drafter is a model with layers and a KV cache."""
        return self.method in DRAFT_METHODS

    @property
    def drafts_block(self) -> bool:
        """Whether the head fills in a block of mask tokens, which attend to each other in both directions."""
        return self.method in BLOCK_METHODS

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DrafterSpec":
        """Load the result of `dataclasses.asdict`; an unknown or missing key raises a ConfigError."""
        _require_valid_keys(cls, values)
        rates = values.get("synthetic_rates")
        return cls(**{**values, "synthetic_rates": None if rates is None else tuple(rates)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One vLLM engine.

    Attributes:
        model: the target: a folder (local or s3://) or a hub id.
        revision: the commit of a hub id. If the commit is unknown: a branch, a tag or None. For a folder on S3, a
            digest of its listing (`fetched.py`).
        precision: one of `PRECISIONS`, resolved on the hardware that runs the engine.
        kv_cache_precision: "bf16", "fp8", or "auto" to follow `precision`.
        native_quantization: the checkpoint's own quantisation, such as "mxfp4".
        max_num_seqs: maximum number of concurrent requests.
        max_model_len: maximum sum of prompt and output tokens of a request; by default the model's context.
        num_nodes: number of nodes, each with an equal part of the engine's accelerators.
        kv_cache_gib: size of the KV cache; None chooses it automatically (CPU: `memory.py`; GPU: vLLM's profiling).
        load_format: vLLM's load format; "dummy" fills the target's weights at random for timing.
        max_num_batched_tokens: maximum tokens of one step; by default computed from K and `max_num_seqs`.
        extra: more vLLM engine arguments, by vLLM's names.
        limit_mm_per_prompt: maximum media of a request by modality; empty for text only.
        allowed_media_domains: hosts from which the engine may fetch media; if empty, media must be in the request.
    """

    model: str
    drafter: DrafterSpec | None = None
    precision: str = "auto"
    kv_cache_precision: str = "auto"
    native_quantization: str | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enforce_eager: bool = False
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    load_format: str = "auto"
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    num_nodes: int = 1
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    allowed_media_domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("an engine requires a model")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {self.precision!r}", hint=did_you_mean(self.precision, PRECISIONS))
        for name in ("max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "num_nodes"):
            _require_positive(name, getattr(self, name))
        if self.num_accelerators % self.num_nodes:
            raise ConfigError(f"{self.num_nodes} nodes cannot hold equal parts of {self.num_accelerators} accelerators")
        for name in ("max_model_len", "kv_cache_gib", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be within (0, 1], not {self.gpu_memory_utilization}")

    @property
    def num_accelerators(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def accelerators_per_node(self) -> int:
        return self.num_accelerators // self.num_nodes

    @property
    def caches_prefixes(self) -> bool:
        """Whether vLLM's prefix cache is on.

        The cache is off with a block head: vLLM computes the head's keys and values only for tokens that the target
        computes, so after a restored prefix nearly all drafts are rejected (vllm-project/vllm issue 47930).
        """
        return self.enable_prefix_caching and not (self.drafter is not None and self.drafter.drafts_block)

    @property
    def commits(self) -> dict[str, str]:
        """The pinned commits of target and head, by hub id."""
        pinned = [(self.model, self.revision)]
        if self.drafter is not None:
            pinned.append((self.drafter.model, self.drafter.revision))
        return {model: revision for model, revision in pinned if revision is not None}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "allowed_media_domains": list(self.allowed_media_domains)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngineSpec":
        """Load the result of `to_dict`; an unknown or missing key raises a ConfigError."""
        _require_valid_keys(cls, values)
        drafter = values.get("drafter")
        domains = tuple(values.get("allowed_media_domains", ()))
        drafter = DrafterSpec.from_dict(drafter) if drafter is not None else None
        return cls(**{**values, "drafter": drafter, "allowed_media_domains": domains})


def spec_precision(spec: EngineSpec, hardware: Hardware) -> Precision:
    """Return the number formats of an engine on its hardware; raises the errors of `resolve_precision`."""
    return resolve_precision(
        spec.precision,
        hardware,
        native_quantization=spec.native_quantization,
        kv_cache=spec.kv_cache_precision,
        context_tokens=spec.max_model_len,
    )


def _require_positive(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and value > 0):  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number above zero, not {value!r}")


def _require_valid_keys(cls: type, values: Mapping[str, Any]) -> None:
    valid = [f.name for f in fields(cls)]
    for key in values:
        if key not in valid:
            raise ConfigError(f"unknown key {key!r} in {cls.__name__}", hint=did_you_mean(key, valid))
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"missing keys in {cls.__name__}: {', '.join(missing)}")
