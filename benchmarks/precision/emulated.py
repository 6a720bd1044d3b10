"""A target in W8A8 as vLLM's kernels compute it, emulated on any machine.

Computed with transformers. The weights are those that `--precision int8` converts, activations are quantised by token
and symmetrically, and the integer products are added exactly. All else is in float32.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from peagle.catalog.int8_weights import weight_files

_LEVELS = 127


class Int8Linear(torch.nn.Module):
    """A linear layer as vLLM's kernels compute it in W8A8."""

    def __init__(self, stored_NK: torch.Tensor, scale_N1: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight_KN = stored_NK.float().T.contiguous()
        self.scale_N = scale_N1.float().squeeze(1)
        self.bias = bias

    def forward(self, x_BK: torch.Tensor) -> torch.Tensor:
        """The layer's outputs [..., N] for inputs [..., K]."""
        scale_B1 = x_BK.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / _LEVELS
        # Integers of up to 14 bits, summed in float32, which holds them exactly up to 24 bits and hardly errs above.
        sums_BN = (x_BK / scale_B1).round() @ self.weight_KN
        found_BN = sums_BN * scale_B1 * self.scale_N
        return found_BN if self.bias is None else found_BN + self.bias


def load(folder: Path, int8_folder: Path | None) -> Any:
    """The target in float32; with a converted folder its linear layers in INT8."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if int8_folder is None:
        return model
    stored = {name: tensor for file in weight_files(int8_folder) for name, tensor in load_file(file).items()}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            path = name.removesuffix(".weight")
            bias = getattr(model.get_submodule(path), "bias", None)
            model.set_submodule(path, Int8Linear(tensor, stored[f"{name}_scale"], bias))
    return model
