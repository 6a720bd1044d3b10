"""Read a checkpoint's own quantisation from its `config.json`, and check that the hardware can compute it.

vLLM accepts some quantised checkpoints on hardware that computes them wrongly or crashes.
"""

from collections.abc import Mapping
from typing import Any, Literal

from peagle.engine.precision import INT8_NEEDS
from peagle.errors import PrecisionError
from peagle.hardware import Hardware

# `QuantizationMethods` of vLLM 0.29, without the two that require `allow_deprecated_quantization`. Copied here because
# importing vLLM takes about 15 s; a test compares them.
VLLM_METHODS = frozenset(
    {
        "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "experts_int8", "fp8",
        "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "gpt_oss_mxfp4", "gptq", "gptq_marlin", "humming", "inc",
        "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16",
        "mxfp4", "mxfp8", "nvfp4_per_token", "online", "quark", "torchao",
    }
)  # fmt: skip


def checkpoint_quant_method(config: Mapping[str, Any]) -> str | None:
    """Return a checkpoint's quantisation method in vLLM's spelling, such as `mxfp4`; None if it is not quantised."""
    method = _quantization(config).get("quant_method")
    return str(method).lower().replace("compressed_tensors", "compressed-tensors") if method else None


def checkpoint_kv_cache_dtype(config: Mapping[str, Any]) -> Literal["fp8"] | None:
    """Return "fp8" if a checkpoint was quantised for an FP8 KV cache, or None.

    compressed-tensors has a `kv_cache_scheme`; ModelOpt has that or a `kv_cache_quant_algo`.
    """
    quantization = _quantization(config)
    is_fp8 = _bits_and_type(quantization.get("kv_cache_scheme")) == (8, "float")
    return "fp8" if is_fp8 or str(quantization.get("kv_cache_quant_algo")).lower() == "fp8" else None


def require_supported(config: Mapping[str, Any], hardware: Hardware) -> None:
    """Refuse a quantised checkpoint that vLLM cannot read, or that this hardware computes wrongly.

    W8A8 in INT8: see `docs/decisions/0016-int8-needs-vnni.md`. FP8 on a CPU requires AMX (`CPUFp8BlockScaledMMKernel`).

    Raises:
        PrecisionError: with a hint about what works.
    """
    if (method := checkpoint_quant_method(config)) and method not in VLLM_METHODS:
        raise PrecisionError(
            f"the checkpoint is quantised by {method}, which vLLM does not support",
            hint="use the model's checkpoint in 16 bits, or one quantised by compressed-tensors, AWQ or GPTQ",
        )
    quantization = _quantization(config)
    groups = (quantization.get("config_groups") or {}).values()
    activations = {_bits_and_type(group.get("input_activations")) for group in groups if isinstance(group, Mapping)}
    has_fp8_method = quantization.get("quant_method") == "fp8"
    has_fp8_algorithm = str(quantization.get("quant_algo")).upper().startswith("FP8")
    if (8, "int") in activations:
        number_format, is_supported, needs = "int8", hardware.supports_int8, INT8_NEEDS[hardware.platform]
    elif (8, "float") in activations or has_fp8_method or has_fp8_algorithm:
        is_supported = hardware.platform != "cpu" or "amx_tile" in hardware.cpu_flags
        number_format, needs = "fp8", "a CPU with AMX, or a GPU"
    else:
        return
    if not is_supported:
        raise PrecisionError(
            f"the checkpoint's weights and activations are {number_format}, which needs {needs}; "
            f"this is {hardware.describe()}",
            hint="use the model's checkpoint in 16 bits",
        )


def _bits_and_type(scheme: Any) -> tuple[Any, Any] | None:
    return (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, Mapping) else None


def _quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's quantisation from the keys where vLLM looks for it."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if quantization := part.get(key):
                return {**quantization, **(quantization.get("quantization") or {})}
    return {}
