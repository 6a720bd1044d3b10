"""Convert a model folder to INT8: `python -m peagle.catalog.int8_weights`.

The arguments are SOURCE FOLDER.

A matrix [N, K] of a linear layer is converted to int8 with one float32 scale per output, symmetric, so that the largest
element of a row becomes 127. The engine quantises activations per token. Embeddings, lm_head, norms, routers, and
image and audio towers are not converted. The format is compressed-tensors, "int-quantized".

Runs as a separate process and file by file, so that models can be larger than memory.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.catalog.converted import MANIFEST

if TYPE_CHECKING:
    import torch

# Linear layers that vLLM's architectures build with the checkpoint's quantisation. vLLM fuses q, k, v and gate, up, so
# either all of them or none are converted.
_LINEAR = re.compile(r"(.*\.)?layers\.\d+\.(.*\.)?((q|k|v|o|qkv|gate|up|down|gate_up)_proj|w[123])\.weight")
_TOWER = re.compile(r"vision|visual|image|audio|speech")
_LM_HEAD = r"re:(.*\.)?lm_head$"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX = "model.safetensors.index.json"
_MAX = 127


def is_quantisable(name: str, num_dimensions: int) -> bool:
    """Return whether a tensor is a matrix that is converted.

    >>> is_quantisable("model.layers.0.mlp.down_proj.weight", 2), is_quantisable("lm_head.weight", 2)
    (True, False)
    """
    return num_dimensions == 2 and _LINEAR.fullmatch(name) is not None and _TOWER.search(name) is None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: those in its index, or all."""
    index = folder / _INDEX
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def convert(source: Path, folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in source.iterdir():
        is_weights = file.suffix in _OTHER_WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not file.name.startswith(".") and file.name != MANIFEST and not is_weights:
            shutil.copyfile(file, folder / file.name)
    kept: list[str] = []
    for file in weight_files(source):
        written: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a handle is no mapping
                tensor = opened.get_tensor(name)
                if is_quantisable(name, tensor.dim()):
                    written[name], written[f"{name}_scale"] = quantize(name, tensor)
                    continue
                written[name] = tensor
                kept += [name.removesuffix(".weight")] * (name.endswith(".weight") and tensor.dim() == 2)
        save_file(written, folder / file.name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(kept)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def quantize(name: str, weight_NK: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the matrix in int8, and its scales [N, 1] in float32.

    A row [0.5, -2.0] has the scale 2 / 127 and is stored as [32, -127].
    """
    import torch

    if weight_NK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is {weight_NK.dtype}, but weights must have 16 or 32 bits")
    exact_NK = weight_NK.float()
    if not torch.isfinite(exact_NK).all():
        raise ValueError(f"{name} has values that are not finite")
    largest_N1 = exact_NK.abs().amax(dim=1, keepdim=True)
    scale_N1 = torch.where(largest_N1 > 0, largest_N1 / _MAX, 1.0)
    return (exact_NK / scale_N1).round().clamp(-_MAX, _MAX).to(torch.int8), scale_N1


def quantization_config(kept: Iterable[str]) -> Mapping[str, Any]:
    """Return the `quantization_config` of `config.json`, in the format of compressed-tensors.

    Args:
        kept: modules with a matrix that is not converted.
    """
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": [*sorted(kept), _LM_HEAD],
    }


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
