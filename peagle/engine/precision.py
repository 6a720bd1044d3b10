"""The number formats of an engine's computation and caches, resolved from the request and the hardware.

| requested | CUDA, capability >= 8.9 | older CUDA            | CPU with AVX-512         | other CPU |
|-----------|-------------------------|-----------------------|--------------------------|-----------|
| auto      | fp8 weights             | bf16 (float16 < 8.0)  | bf16                     | float32   |
| fp8       | weights and KV cache    | refused               | fp8 KV cache, else bf16  | refused   |
| int8      | weights (refused >= 10) | weights, from 7.5     | weights, with VNNI       | with VNNI |
| bf16      | bf16                    | bf16 (refused < 8.0)  | bf16                     | bf16      |

On CUDA, `auto` uses an FP8 KV cache only for long contexts (`_MIN_FP8_CACHE_TOKENS`).

A checkpoint that is published quantised (gpt-oss in MXFP4) keeps its weights and refuses int8 and float32. With
`auto`, it keeps its published cache format, if the hardware supports it. INT8 is W8A8: weights are converted beforehand
(`catalog/int8.py`), activations at run time. Everything else is computed in bf16; in float16 below capability 8.0; in
float32 on CPUs without AVX-512.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from peagle.errors import PrecisionError, did_you_mean
from peagle.hardware import Hardware

PrecisionName = Literal["auto", "bf16", "fp8", "int8", "float16", "float32"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionName)
KV_CACHE_PRECISIONS = ("auto", "bf16", "fp8")

INT8_NEEDS = {
    "cuda": "CUDA compute capability 7.5 to 9.0 (Turing to Hopper)",
    "cpu": "a CPU with VNNI (AVX-512 VNNI or AVX-VNNI)",
}

Dtype = Literal["bfloat16", "float16", "float32"]

# By major compute capability: the context in tokens above which a request decodes faster with an FP8 KV cache, on H100
# and B200 (vLLM blog, "The State of FP8 KV-Cache and Attention Quantization in vLLM", 2026-04-22). The post has no
# numbers for other cards, and says that heads wider than `WIDEST_FP8_HEAD` prefill more slowly with an FP8 KV cache.
_MIN_FP8_CACHE_TOKENS = {9: 7_000, 10: 4_000}
WIDEST_FP8_HEAD = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The number formats of an engine, in vLLM's terms.

    Attributes:
        dtype: format of activations, and of weights unless quantised.
        quantization: format of the weights of linear layers: FP8 (converted by vLLM when loading), INT8 (in a converted
            folder), or None (as published).
        kv_cache_dtype: "auto" means `dtype`; "fp8" is E4M3.
        native_quantization: the checkpoint's own quantisation, such as "mxfp4".
    """

    dtype: Dtype
    quantization: Literal["fp8", "int8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    native_quantization: str | None = None

    @property
    def weights(self) -> str:
        return self.native_quantization or self.quantization or _SHORT_NAMES[self.dtype]

    @property
    def kv_cache(self) -> str:
        return _SHORT_NAMES[self.dtype] if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def name(self) -> str:
        """The option for these weights: one of `PRECISIONS` except `auto`.

        >>> Precision(dtype="bfloat16", native_quantization="mxfp4").name
        'bf16'
        """
        return self.quantization or _SHORT_NAMES[self.dtype]

    @property
    def kv_cache_name(self) -> str:
        """The option for this KV cache: one of `KV_CACHE_PRECISIONS`; `auto` for other formats."""
        return self.kv_cache if self.kv_cache in KV_CACHE_PRECISIONS else "auto"

    def describe(self) -> str:
        return f"{self.weights} weights, {self.kv_cache} KV cache"


_SHORT_NAMES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "float16", "float32": "float32"}


def resolve_precision(
    requested: str,
    hardware: Hardware,
    *,
    native_quantization: str | None = None,
    native_kv_cache: Literal["fp8"] | None = None,
    kv_cache: str = "auto",
    context_tokens: int | None = None,
    head_dim: int = 0,
) -> Precision:
    """Return the formats for `requested` on `hardware`.

    Args:
        native_kv_cache: the format of the KV cache that the checkpoint was published for, or None.
        kv_cache: one of `KV_CACHE_PRECISIONS`; "auto" follows `requested`.
        context_tokens: maximum tokens of a request; None if unknown.
        head_dim: dimension of the target's widest attention heads.

    Raises:
        PrecisionError: unknown name, or not supported by the hardware or the checkpoint; with a hint.
    """
    if requested not in PRECISIONS:
        raise PrecisionError(f"unknown precision {requested!r}", hint=did_you_mean(requested, PRECISIONS))
    chosen = _auto_precision(hardware, native_quantization, kv_cache) if requested == "auto" else requested
    precision = _resolve(chosen, hardware, native_quantization)
    if kv_cache != "auto":
        return _with_kv_cache(precision, kv_cache, hardware)
    if requested != "auto":
        return precision
    if native_kv_cache is not None and hardware.supports_fp8_kv_cache:
        return replace(precision, kv_cache_dtype=native_kv_cache)
    # FP8 halves the KV cache, but attention in FP8 costs time. So only long contexts with narrow heads use it.
    major, _ = hardware.compute_capability or (0, 0)
    if head_dim > WIDEST_FP8_HEAD or (context_tokens or 0) < _MIN_FP8_CACHE_TOKENS.get(major, math.inf):
        return replace(precision, kv_cache_dtype="auto")
    return precision


def _resolve(chosen: str, hardware: Hardware, native_quantization: str | None) -> Precision:
    if chosen == "fp8":
        return _fp8_precision(hardware, native_quantization)
    if native_quantization and chosen in ("int8", "float32"):
        raise PrecisionError(
            f"the checkpoint's weights are {native_quantization}: they cannot be run in {chosen}",
            hint="use --precision auto",
        )
    if chosen == "int8":
        if not hardware.supports_int8:
            needs = INT8_NEEDS[hardware.platform]
            raise PrecisionError(f"int8 needs {needs}; this is {hardware.describe()}", hint=_other_formats(hardware))
        if not hardware.supports_bf16:
            return Precision(dtype="float16", quantization="int8")
        return Precision(dtype="float32" if hardware.has_slow_bf16 else "bfloat16", quantization="int8")
    if chosen == "bf16" and not hardware.supports_bf16:
        raise PrecisionError(
            f"bf16 needs CUDA compute capability 8.0 (Ampere or later); this is {hardware.describe()}",
            hint="use --precision float16, or float32 if exactness matters more than speed",
        )
    dtypes: dict[str, Dtype] = {short: dtype for dtype, short in _SHORT_NAMES.items()}
    return Precision(dtype=dtypes[chosen], native_quantization=native_quantization)


def _auto_precision(hardware: Hardware, native_quantization: str | None, kv_cache: str) -> str:
    """Return the precision that `auto` means on this hardware."""
    if hardware.supports_fp8_weights and native_quantization is None:
        return "fp8"
    # float32 needs twice the memory. An explicitly requested cache requires bf16 weights.
    if hardware.has_slow_bf16 and native_quantization is None and kv_cache == "auto":
        return "float32"
    return "bf16" if hardware.supports_bf16 else "float16"


def _fp8_precision(hardware: Hardware, native_quantization: str | None) -> Precision:
    if not hardware.supports_fp8_kv_cache:
        needs = "CUDA compute capability 8.9 (Ada, Hopper or later)" if hardware.platform == "cuda" else "AVX-512"
        raise PrecisionError(
            f"fp8 needs {needs}; this is {hardware.describe()}", hint=_other_formats(hardware, native_quantization)
        )
    is_converted = hardware.supports_fp8_weights and native_quantization is None
    return Precision(
        dtype="bfloat16",
        quantization="fp8" if is_converted else None,
        kv_cache_dtype="fp8",
        native_quantization=native_quantization,
    )


def _other_formats(hardware: Hardware, native_quantization: str | None = None) -> str:
    """Return a hint with the precisions to use instead of an 8-bit format that this hardware lacks."""
    eight_bits = {"fp8": hardware.supports_fp8_weights, "int8": hardware.supports_int8 and native_quantization is None}
    names = [name for name, is_supported in eight_bits.items() if is_supported]
    names.append("bf16" if hardware.supports_bf16 else "float16")
    return f"use --precision {', '.join(names)}, or auto for the best precision on this hardware"


def _with_kv_cache(precision: Precision, kv_cache: str, hardware: Hardware) -> Precision:
    if kv_cache not in KV_CACHE_PRECISIONS:
        hint = did_you_mean(kv_cache, KV_CACHE_PRECISIONS)
        raise PrecisionError(f"unknown precision {kv_cache!r} of the KV cache", hint=hint)
    if precision.dtype != "bfloat16":
        raise PrecisionError(
            f"a KV cache in {kv_cache} requires an engine in bf16, fp8 or int8, not {_SHORT_NAMES[precision.dtype]}",
            hint="remove --kv-cache-precision, or use --precision bf16",
        )
    if kv_cache == "fp8" and not hardware.supports_fp8_kv_cache:
        raise PrecisionError(
            f"{hardware.describe()} does not support a KV cache in fp8", hint="use --kv-cache-precision bf16"
        )
    return replace(precision, kv_cache_dtype="fp8" if kv_cache == "fp8" else "auto")
