"""Convert a model folder to INT8: `python -m peagle.catalog.int8_weights`.

Its arguments are SOURCE FOLDER.

A matrix [N, K] of a linear layer becomes int8 with one float32 scale for each of its N outputs, symmetric, so that the
largest element of a row stands at 127. Activations are quantised by the engine, token by token, as it runs. Everything
else stays: embeddings, lm_head, norms, routers, and towers of images and sound. In vLLM's words it is
compressed-tensors, "int-quantized".

Run as a process of its own, file by file, so that a model larger than memory is no obstacle.
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

# The linear layers that the architectures of vLLM build with the checkpoint's own quantisation. q, k, v and gate, up
# are one matrix each in vLLM: all or none.
_LINEAR = re.compile(r"(.*\.)?layers\.\d+\.(.*\.)?((q|k|v|o|qkv|gate|up|down|gate_up)_proj|w[123])\.weight")
_TOWER = re.compile(r"vision|visual|image|audio|speech")
_LM_HEAD = r"re:(.*\.)?lm_head$"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX = "model.safetensors.index.json"
_MAX = 127


def is_quantisable(name: str, num_dimensions: int) -> bool:
    """Whether a tensor is the matrix of a linear layer that is converted.

    >>> is_quantisable("model.layers.0.mlp.down_proj.weight", 2), is_quantisable("lm_head.weight", 2)
    (True, False)
    """
    return num_dimensions == 2 and _LINEAR.fullmatch(name) is not None and _TOWER.search(name) is None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those that its index names, else all."""
    index = folder / _INDEX
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def convert(source: Path, folder: Path) -> None:
    """Write the model in `source` into `folder`.

    Raises:
        ValueError: an element is not finite, or a weight is not in 16 or 32 bits.
    """
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
    """The matrix in int8, and its scales [N, 1] in float32.

    A row of [0.5, -2.0] has the scale 2 / 127 and is stored as [32, -127].

    Raises:
        ValueError: an element is not finite, or the matrix is not in 16 or 32 bits.
    """
    import torch

    if weight_NK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is in {weight_NK.dtype}, and weights of 16 or 32 bits are converted")
    exact_NK = weight_NK.float()
    if not torch.isfinite(exact_NK).all():
        raise ValueError(f"{name} holds values that are not finite")
    largest_N1 = exact_NK.abs().amax(dim=1, keepdim=True)
    scale_N1 = torch.where(largest_N1 > 0, largest_N1 / _MAX, 1.0)
    return (exact_NK / scale_N1).round().clamp(-_MAX, _MAX).to(torch.int8), scale_N1


def quantization_config(kept: Iterable[str]) -> Mapping[str, Any]:
    """The weights' part of `config.json`, in the words of compressed-tensors.

    Args:
        kept: names of the modules with a matrix that is not converted.
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
