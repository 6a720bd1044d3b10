"""Choose attention back ends that are safe with an FP8 KV cache and a drafter.

vLLM uses any back end that declares support. For combinations that vLLM issues report as broken, peagle chooses another
back end and refuses an explicit choice of the broken back end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from peagle.engine.precision import WIDEST_FP8_HEAD
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.errors import ConfigError
from peagle.hardware import Hardware

_FLASHINFER, _TRITON = "FLASHINFER", "TRITON_ATTN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoided:
    """A broken combination of FlashInfer with an FP8 KV cache.

    Attributes:
        capabilities: the first and the last affected compute capability.
        min_k: smallest affected K; 0 if engines without a drafter are affected, too.
        replacement: the back end to use; None if vLLM chooses another one by itself.
    """

    capabilities: tuple[tuple[int, int], tuple[int, int]]
    min_k: int
    symptom: str
    source: str
    replacement: str | None

    def affects(self, spec: EngineSpec, hardware: Hardware) -> bool:
        """Return whether this engine and hardware have the broken combination, assuming an FP8 KV cache."""
        k = spec.drafter.num_speculative_tokens if spec.drafter else 0
        first, last = self.capabilities
        return k >= self.min_k and first <= (hardware.compute_capability or (0, 0)) <= last


AVOIDED = (
    Avoided(
        capabilities=((12, 0), (12, 9)),
        min_k=0,
        symptom="random output with CUDA graphs",
        source="vllm-project/vllm issues 41651 and 49010",
        replacement=_TRITON,
    ),
    # On these GPUs, FlashAttention 3 supports FP8 for narrow heads, and vLLM prefers it.
    Avoided(
        capabilities=((9, 0), (9, 0)),
        min_k=3,
        symptom="kernels that do not compile",
        source="vllm-project/vllm issues 33364 and 31843",
        replacement=None,
    ),
    Avoided(
        capabilities=((8, 9), (8, 9)),
        min_k=1,
        symptom="an illegal memory access",
        source="vllm-project/vllm issue 44879",
        replacement=_TRITON,
    ),
)


def target_backend(spec: EngineSpec, hardware: Hardware) -> str | None:
    """Return the target's back end, or None if vLLM chooses. Raises ConfigError if the user chose a broken back end."""
    config = spec.extra.get("attention_config")
    configured = config.get("backend") if isinstance(config, Mapping) else None
    requested = spec.extra.get("attention_backend") or configured
    backend = _backend(requested, spec, hardware, spec_precision(spec, hardware).kv_cache)
    return None if configured else backend  # vLLM accepts only one of the two settings


def draft_backend(spec: EngineSpec, hardware: Hardware) -> str | None:
    """Return the drafter's back end, or None if vLLM chooses; raises ConfigError as `target_backend` does."""
    drafter = spec.drafter
    if drafter is None or not drafter.has_head:
        return None
    requested = drafter.attention_backend
    if drafter.drafts_block and (hardware.compute_capability or (0, 0)) >= (12, 0):
        # vLLM chooses FlashAttention, whose kernels for attention in both directions fail (vllm issue 50707).
        requested = requested or _TRITON
    return _backend(requested, spec, hardware, _draft_cache(spec, hardware))


def _draft_cache(spec: EngineSpec, hardware: Hardware) -> str | None:
    """Return the format of the drafter's KV cache; None without a drafter."""
    drafter = spec.drafter
    if drafter is None or not drafter.has_head:
        return None
    if drafter.kv_cache_precision != "auto":
        return drafter.kv_cache_precision
    return spec_precision(spec, hardware).kv_cache


def _check_drafter(spec: EngineSpec, hardware: Hardware) -> None:
    """Raise a ConfigError if vLLM cannot run the drafter on this hardware or with these options."""
    drafter = spec.drafter
    if drafter is None or not drafter.drafts_block:
        return
    if drafter.method == "dspark" and hardware.platform != "cuda":
        raise ConfigError(
            "DSpark requires vLLM's model runner V2, which runs on GPUs only", hint="use another --drafter on a CPU"
        )
    if drafter.kv_cache_precision == "fp8":
        raise ConfigError(
            f"the KV cache of a {drafter.method} head cannot be fp8: vLLM does not support it for attention in both"
            " directions (vllm-project/vllm issue 41559)",
            hint="remove --draft-kv-cache-precision; the target's KV cache can still be fp8",
        )


def check_backends(spec: EngineSpec, hardware: Hardware, *, head_dim: int) -> None:
    """Refuse broken combinations before anything starts.

    Args:
        head_dim: dimension of the target's widest attention heads; the drafter's heads are assumed to be as wide.

    Raises:
        ConfigError: see `target_backend`; or vLLM would choose a broken back end for the drafter and no other exists.
    """
    if spec.drafter is not None and spec.extra.get("decode_context_parallel_size", 1) != 1:
        raise ConfigError(
            "decode_context_parallel_size is refused with a drafter: output is truncated or repeats itself with CUDA"
            " graphs (vllm-project/vllm issue 45425)",
            hint="remove decode_context_parallel_size, or use --drafter none",
        )
    _check_drafter(spec, hardware)
    target_backend(spec, hardware)
    backend, is_fp8 = draft_backend(spec, hardware), _draft_cache(spec, hardware) == "fp8"
    broken = next((entry for entry in AVOIDED if entry.replacement is None and entry.affects(spec, hardware)), None)
    if is_fp8 and backend is None and broken is not None and head_dim > WIDEST_FP8_HEAD:
        raise ConfigError(
            f"with attention heads as wide as {head_dim}, vLLM would use {_FLASHINFER} for the drafter's KV cache in"
            f" fp8, which is refused on {hardware.accelerator}: {broken.symptom} ({broken.source})",
            hint=f"use --kv-cache-precision bf16, or --draft-attention-backend {_TRITON}",
        )


def _backend(requested: str | None, spec: EngineSpec, hardware: Hardware, kv_cache: str | None) -> str | None:
    """Return the requested back end, or a replacement if vLLM would choose a broken one. Refuses a broken request."""
    avoided = next((entry for entry in AVOIDED if kv_cache == "fp8" and entry.affects(spec, hardware)), None)
    if avoided is None:
        return requested
    if requested is not None and requested.upper() == _FLASHINFER:
        raise ConfigError(
            f"{requested} with a KV cache in fp8 is refused on {hardware.accelerator}:"
            f" {avoided.symptom} ({avoided.source})",
            hint=f"remove the attention back end, use {_TRITON}, or use --kv-cache-precision bf16",
        )
    return requested or avoided.replacement
