"""FP8 weights of drafter heads: quantisation, scales, errors.

A matrix [N, K] becomes float8_e4m3fn with a float32 scale per row. The largest element of a row becomes 448, the
largest value of the format. The engine quantises activations per token.

Only weights that vLLM 0.29 can load in FP8 are quantised (`model_executor/models/llama_eagle3.py` and
`qwen3_eagle3.py`): the projections of the decoder layers, `fc`, and `lm_head` if the head has its own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peagle.errors import DrafterError

FP8 = torch.float8_e4m3fn
SCALE = "_scale"  # vLLM looks for `X.weight_scale` next to `X.weight`
# Only these may stay in bf16: vLLM fuses q, k and v, and gate and up, so a layer needs one format.
MAY_STAY_BF16 = ("fc", "lm_head")
_MAX = torch.finfo(FP8).max  # 448
_SMALLEST_NORMAL = torch.finfo(FP8).smallest_normal  # 2^-6; smaller values have fewer mantissa bits
_LAYER = r"(layers\.\d+|midlayer)\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_QUANTISABLE = re.compile(rf"({_LAYER}|fc|lm_head)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """The error of a stored weight [N, K].

    Attributes:
        max_relative, mean_relative: |stored - original| / |original| over elements in FP8's normal range.
        rms_relative: norm of the difference over norm of the original, for all elements.
    """

    name: str
    shape: tuple[int, ...]
    max_relative: float
    mean_relative: float
    rms_relative: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reason_to_keep(name: str, tensor: torch.Tensor, keep: Iterable[str]) -> str | None:
    """Return why a tensor of a head is not quantised, or None if it is quantised.

    `keep` are the modules of `MAY_STAY_BF16` that the user wants to keep in bf16.
    """
    module = name.removesuffix(".weight")
    if module in keep:
        return "--keep"
    if _QUANTISABLE.fullmatch(name):
        return None
    if module.endswith("embed_tokens"):
        return "vLLM builds a drafter's embedding without quantisation"
    if not is_matrix(name, tensor):
        return "not a matrix"
    return "vLLM has no quantised layer of that name in a drafter"


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the [N, K] weight of a layer; `mask_hidden` is [1, 1, K]."""
    return name.endswith(".weight") and tensor.dim() == 2


def quantize(name: str, weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in FP8, and its scales [N, 1] in float32. Raises DrafterError if an element is not finite.

    Example: a row of [0.5, -2.0] has the scale 2 / 448 and is stored as [112, -448].
    """
    exact_NK = weight_NK.float()
    if not torch.isfinite(exact_NK).all():
        raise DrafterError(f"{name} has values that are not finite", hint="the head is damaged: train it again")
    largest_N1 = exact_NK.abs().amax(dim=1, keepdim=True)
    scale_N1 = torch.where(largest_N1 > 0, largest_N1 / _MAX, 1.0)
    return (exact_NK / scale_N1).clamp(-_MAX, _MAX).to(FP8), scale_N1


def dequantize(stored_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return stored_NK.float() * scale.float()


def dequantize_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in bf16: FP8 matrices are dequantised, and their scales are removed."""
    quantised = {name for name, tensor in tensors.items() if tensor.dtype == FP8}
    if unscaled := sorted(name for name in quantised if name + SCALE not in tensors):
        raise DrafterError(f"{unscaled[0]} has no scale", hint="the head is damaged: copy it again")
    converted = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALE) not in quantised}
    for name in quantised:
        converted[name] = dequantize(tensors[name], tensors[name + SCALE]).to(torch.bfloat16)
    return converted


def weight_error(name: str, original_NK: torch.Tensor, stored_NK: torch.Tensor, scale: torch.Tensor) -> WeightError:
    """Return the error of the weight `stored_NK`. `scale` determines which elements are in FP8's normal range."""
    original_NK, stored_NK = original_NK.float(), stored_NK.float()
    difference_NK = (stored_NK - original_NK).abs()
    is_normal_NK = original_NK.abs() >= _SMALLEST_NORMAL * scale.float()
    relative = difference_NK[is_normal_NK] / original_NK[is_normal_NK].abs()
    norm = original_NK.norm().item()
    return WeightError(
        name=name,
        shape=tuple(original_NK.shape),
        max_relative=relative.max().item() if relative.numel() else 0.0,
        mean_relative=relative.mean().item() if relative.numel() else 0.0,
        rms_relative=difference_NK.norm().item() / norm if norm else 0.0,
    )


def quantization_config(tensors: Mapping[str, torch.Tensor], kept: Mapping[str, str]) -> dict[str, Any]:
    """Return the quantisation part of `config.json`, in the format of compressed-tensors.

    `tensors` are the head's weights before quantisation; `kept` has the tensors that stay as they are, with the reason.
    """
    # Layers are named by patterns, because vLLM continues the target's layer numbers in the drafter. `targets`
    # names lm_head separately, because it is not a `Linear` in vLLM.
    has_fp8_lm_head = "lm_head.weight" in tensors.keys() - kept.keys()
    matrices = [name.removesuffix(".weight") for name in kept if is_matrix(name, tensors[name])]
    ignored = {name.rpartition(".")[2] for name in matrices} | {"embed_tokens"}
    ignored |= set() if has_fp8_lm_head else {"lm_head"}
    number_format = {"num_bits": 8, "type": "float", "symmetric": True}
    layer_group = {
        "targets": ["Linear"] + ([_pattern("lm_head")] if has_fp8_lm_head else []),
        "weights": number_format | {"strategy": "channel", "dynamic": False},
        "input_activations": number_format | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": layer_group},
        "ignore": [_pattern(module) for module in sorted(ignored)],
    }


def _pattern(module: str) -> str:
    return rf"re:(.*\.)?{module}$"
