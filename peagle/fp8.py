"""FP8 arithmetic of heads: matrices, values, scales, errors.

A matrix [N, K] becomes float8_e4m3fn with one float32 scale for each of its N outputs, so that the largest element
of a row stands at 448, the format's largest. Activations are quantised by the engine, token by token, as it runs. It
knows tensors and vLLM's rules for them, and nothing of files.

What is quantised follows what vLLM 0.29 builds with the drafter's own quantisation
(`model_executor/models/llama_eagle3.py` and `qwen3_eagle3.py`): the projections of the decoder layers, `fc` and, if
the head has one of its own, `lm_head`. `embed_tokens` is built without.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peagle.errors import DrafterError

FP8 = torch.float8_e4m3fn
SCALE = "_scale"  # vLLM looks for `X.weight_scale` beside `X.weight`
OPTIONAL = ("fc", "lm_head")  # what may stay as it is; q, k, v and gate, up are one matrix each in vLLM: all or none
_MAX = torch.finfo(FP8).max  # 448
_SMALLEST_NORMAL = torch.finfo(FP8).smallest_normal  # 2^-6; below it the three mantissa bits go one by one
_LAYER = r"(layers\.\d+|midlayer)\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_QUANTISABLE = re.compile(rf"({_LAYER}|fc|lm_head)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """How far a stored weight is from the one it came from.

    Attributes:
        name: of the tensor.
        shape: [N, K].
        max_relative: largest |stored - original| / |original| over elements that FP8 holds with all its bits.
        mean_relative: the mean of it.
        rms_relative: norm of the difference over norm of the original, all elements.
    """

    name: str
    shape: tuple[int, ...]
    max_relative: float
    mean_relative: float
    rms_relative: float

    def to_dict(self) -> dict[str, Any]:
        """As data for a report."""
        return asdict(self)


def why_kept(name: str, tensor: torch.Tensor, keep: Iterable[str]) -> str | None:
    """Why a tensor of a head stays as it is; None when it is quantised.

    Args:
        name: as the head's file has it.
        tensor: the tensor.
        keep: those of `OPTIONAL` that the user wants to keep.
    """
    module = name.removesuffix(".weight")
    if module in keep:
        return "asked for"
    if _QUANTISABLE.fullmatch(name):
        return None
    if module.endswith("embed_tokens"):
        return "vLLM builds a drafter's embedding without quantisation"
    if not is_matrix(name, tensor):
        return "not a matrix"
    return "vLLM has no quantised layer of that name in a drafter"


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a layer's [N, K]; `mask_hidden` is [1, 1, K] and no layer's."""
    return name.endswith(".weight") and tensor.dim() == 2


def quantize(name: str, weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix in FP8, and its scales [N, 1] in float32.

    A row of [0.5, -2.0] has the scale 2 / 448 and is stored as [112, -448].

    Raises:
        DrafterError: an element is not finite.
    """
    exact_NK = weight_NK.float()
    if not torch.isfinite(exact_NK).all():
        raise DrafterError(f"{name} holds values that are not finite", hint="the head is damaged: train it again")
    largest_N1 = exact_NK.abs().amax(dim=1, keepdim=True)
    scale_N1 = torch.where(largest_N1 > 0, largest_N1 / _MAX, 1.0)
    return (exact_NK / scale_N1).clamp(-_MAX, _MAX).to(FP8), scale_N1


def dequantize(stored_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 matrix's values in float32."""
    return stored_NK.float() * scale.float()


def in_bf16(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without scales: FP8 matrices as their values, rounded to bf16.

    Raises:
        DrafterError: a matrix has no scale.
    """
    quantised = {name for name, tensor in tensors.items() if tensor.dtype == FP8}
    if lost := sorted(name for name in quantised if name + SCALE not in tensors):
        raise DrafterError(f"{lost[0]} has no scale", hint="the head is damaged: copy it again")
    written = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALE) not in quantised}
    for name in quantised:
        written[name] = dequantize(tensors[name], tensors[name + SCALE]).to(torch.bfloat16)
    return written


def weight_error(name: str, original_NK: torch.Tensor, stored_NK: torch.Tensor, scale: torch.Tensor) -> WeightError:
    """The error of `stored_NK` against `original_NK`.

    `scale` tells which elements lie in FP8's normal range.
    """
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
    """The weights' part of `config.json`, in the words of compressed-tensors.

    Layers are named by pattern, since vLLM counts a drafter's layers on from the target's. An lm_head is no `Linear`
    to vLLM and needs a target of its own; a head without one shares the target's, which is none of its business.

    Args:
        tensors: the head's weights before quantisation.
        kept: why each of them stays as it is, of those that do.
    """
    has_fp8_lm_head = "lm_head.weight" in tensors.keys() - kept.keys()
    matrices = [name.removesuffix(".weight") for name in kept if is_matrix(name, tensors[name])]
    ignored = {name.rpartition(".")[2] for name in matrices} | {"embed_tokens"}
    ignored |= set() if has_fp8_lm_head else {"lm_head"}
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"] + ([_pattern("lm_head")] if has_fp8_lm_head else []),
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [_pattern(module) for module in sorted(ignored)],
    }


def _pattern(module: str) -> str:
    return rf"re:(.*\.)?{module}$"
