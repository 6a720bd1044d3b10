"""Targets in INT8, converted once into a folder that vLLM loads.

    $PEAGLE_HOME/targets/<name>-int8-<fingerprint>/    config.json  *.safetensors  tokenizer...
    peagle-manifest.json

Each node converts its own copy from weights of 16 or 32 bits, in a separate process (`python -m peagle.catalog.int8
SOURCE FOLDER`) and file by file, so that models can be larger than memory.

A matrix [N, K] of a linear layer becomes int8 with one float32 scale per output, symmetric, so that the largest element
of a row becomes 127. The engine quantises activations per token. Embeddings, lm_head, norms, routers, and image and
audio towers are not converted. The format is compressed-tensors, "int-quantized".
"""

import dataclasses
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.catalog.converted import MANIFEST, ensure_converted, log_to_stderr, run_converter
from peagle.catalog.folders import folder_fingerprint, peagle_home
from peagle.engine.spec import EngineSpec
from peagle.errors import CatalogError, PrecisionError
from peagle.hardware import Hardware

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
    """Return the `quantization_config` of `config.json`, in the format of compressed-tensors."""
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


CONVERTER_VERSION = 1  # increment when the output of `int8.py` changes
_LIMIT_S = 600
_BYTES_PER_S = 20e6  # of a slow disk
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HINT = "use --precision auto, or bf16"


def require_convertible(path: str, config: Mapping[str, Any], hardware: Hardware) -> None:
    """Check that a target can run in INT8. For a hub id, only the configuration is checked."""
    text = config.get("text_config") or config
    if hardware.platform == "cpu" and "amx_tile" not in hardware.cpu_flags and any(text.get(key) for key in _EXPERTS):
        raise PrecisionError(
            f"vLLM supports int8 experts only on CPUs with AMX; this is {hardware.describe()}", hint=_HINT
        )
    if not Path(path).is_dir():
        return
    shapes = _shapes(Path(path))
    fused = next((name for name, shape in shapes.items() if "experts" in name and len(shape) > 2), None)
    if fused is not None:
        raise PrecisionError(
            f"{path} stores its experts in one tensor ({fused}), which cannot be converted to int8", hint=_HINT
        )
    if not any(is_quantisable(name, len(shape)) for name, shape in shapes.items()):
        reason = "no linear layers to convert to int8" if shapes else "no *.safetensors to convert to int8"
        raise PrecisionError(f"{path} has {reason}", hint=_HINT)


def ensure_int8(
    model: str, revision: str | None = None, *, announce: Callable[[str], None] = lambda message: None
) -> Path:
    """Return the folder of a target in INT8; convert it first if it is missing or damaged.

    Safe for concurrent processes: one converts, the others wait.
    """
    source = Path(model) if Path(model).is_dir() else _downloaded(model, revision)
    fingerprint = folder_fingerprint(source)
    key = f"{fingerprint}:{CONVERTER_VERSION}"
    name = f"{Path(model).name}-int8"
    folder = peagle_home() / "targets" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def fill(out: Path) -> dict[str, Any]:
        limit_s = _LIMIT_S + int(sum(file.stat().st_size for file in weight_files(source)) / _BYTES_PER_S)
        arguments = [str(source), str(out)]
        run_converter("peagle.catalog.int8", arguments, what=f"{model} to int8", limit_s=limit_s)
        return {
            "source": model,
            "source_fingerprint": fingerprint,
            "converter_version": CONVERTER_VERSION,
        }

    return ensure_converted(folder, name, fill, before=lambda: announce(f"converting {model} to {folder} (once)"))


def converted_spec(spec: EngineSpec) -> EngineSpec:
    """Return the spec with this machine's INT8 folder, converting it if necessary. Other precisions are unchanged."""
    if spec.precision != "int8":
        return spec
    folder = ensure_int8(spec.model, spec.revision, announce=log_to_stderr)
    return dataclasses.replace(spec, model=str(folder), revision=None)


def _shapes(folder: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    try:
        for file in weight_files(folder):
            with safe_open(file, framework="numpy") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CatalogError(f"{folder}: its weights cannot be read: {error}", hint="copy the model again") from error
    return shapes


def _downloaded(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    # The client's errors are OSErrors and ValueErrors.
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py"]
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise CatalogError(
            f"the weights of {model_id} cannot be downloaded to convert them to int8: {error}",
            hint="check the network, or use a local folder",
        ) from error
