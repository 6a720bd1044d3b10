"""Targets in INT8: each node converts a target once to `$PEAGLE_HOME/targets/<name>-int8-<fingerprint>/` for vLLM.

`python -m peagle.catalog.int8 SOURCE FOLDER` converts file by file, so that models can be larger than memory. The
format is compressed-tensors, "int-quantized"; the engine quantises activations per token.
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


# Linear layers that vLLM's architectures build with the checkpoint's quantisation. vLLM fuses q, k and v, and
# gate and up, so all matrices of a fused layer are converted or none.
_LINEAR = re.compile(r"(.*\.)?layers\.\d+\.(.*\.)?((q|k|v|o|qkv|gate|up|down|gate_up)_proj|w[123])\.weight")
_ENCODER = re.compile(r"vision|visual|image|audio|speech")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def is_quantizable(name: str, num_dimensions: int) -> bool:
    """Return whether a tensor is a weight matrix that is converted to INT8.

    >>> is_quantizable("model.layers.0.mlp.down_proj.weight", 2), is_quantizable("lm_head.weight", 2)
    (True, False)
    """
    return num_dimensions == 2 and _LINEAR.fullmatch(name) is not None and _ENCODER.search(name) is None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: those in its index, or all."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def convert(source: Path, folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in source.iterdir():
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not file.name.startswith(".") and file.name != MANIFEST and not is_weights:
            shutil.copyfile(file, folder / file.name)
    unconverted: list[str] = []
    for file in weight_files(source):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a handle is not a mapping
                tensor = opened.get_tensor(name)
                if is_quantizable(name, tensor.dim()):
                    tensors[name], tensors[f"{name}_scale"] = quantize(name, tensor)
                    continue
                tensors[name] = tensor
                if name.endswith(".weight") and tensor.dim() == 2:
                    unconverted.append(name.removesuffix(".weight"))
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(unconverted)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def quantize(name: str, weight_NK: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the matrix [N, K] in int8, and its scales [N, 1] in float32: a row's largest magnitude becomes 127.

    A row [0.5, -2.0] has the scale 2 / 127 and is stored as [32, -127].
    """
    import torch

    if weight_NK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is {weight_NK.dtype}, but weights must have 16 or 32 bits")
    exact_NK = weight_NK.float()
    if not torch.isfinite(exact_NK).all():
        raise ValueError(f"{name} has values that are not finite")
    largest_N1 = exact_NK.abs().amax(dim=1, keepdim=True)
    scale_N1 = torch.where(largest_N1 > 0, largest_N1 / 127, 1.0)
    return (exact_NK / scale_N1).round().clamp(-127, 127).to(torch.int8), scale_N1


def quantization_config(unconverted: Iterable[str]) -> Mapping[str, Any]:
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
        "ignore": [*sorted(unconverted), r"re:(.*\.)?lm_head$"],
    }


CONVERTER_VERSION = 1  # increment when the output of `int8.py` changes
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_HINT = "use --precision auto, or bf16"


def require_convertible(path: str, config: Mapping[str, Any], hardware: Hardware) -> None:
    """Check that a target can run in INT8. For a hub id, only the configuration is checked."""
    text_config = config.get("text_config") or config
    has_experts = any(text_config.get(key) for key in _NUM_EXPERTS_KEYS)
    if has_experts and hardware.platform == "cpu" and "amx_tile" not in hardware.cpu_flags:
        raise PrecisionError(
            f"vLLM supports int8 experts only on CPUs with AMX; this is {hardware.describe()}", hint=_HINT
        )
    if not Path(path).is_dir():
        return
    shapes = _shapes(Path(path))
    fused_experts = next((name for name, shape in shapes.items() if "experts" in name and len(shape) > 2), None)
    if fused_experts is not None:
        raise PrecisionError(
            f"{path} stores its experts in one tensor ({fused_experts}), which cannot be converted to int8", hint=_HINT
        )
    if not any(is_quantizable(name, len(shape)) for name, shape in shapes.items()):
        reason = "no linear layers to convert to int8" if shapes else "no *.safetensors to convert to int8"
        raise PrecisionError(f"{path} has {reason}", hint=_HINT)


def ensure_int8(
    model: str, revision: str | None = None, *, announce: Callable[[str], None] = lambda message: None
) -> Path:
    """Return the folder of a target in INT8; convert it first if it is missing or damaged (see `ensure_converted`)."""
    source = Path(model) if Path(model).is_dir() else _downloaded(model, revision)
    fingerprint = folder_fingerprint(source)
    identity = f"{fingerprint}:{CONVERTER_VERSION}"
    name = f"{Path(model).name}-int8"
    folder = peagle_home() / "targets" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def fill(out: Path) -> dict[str, Any]:
        num_bytes = sum(file.stat().st_size for file in weight_files(source))
        limit_s = 600 + int(num_bytes / 20e6)  # a slow disk writes 20 MB/s
        arguments = [str(source), str(out)]
        run_converter("peagle.catalog.int8", arguments, what=f"{model} to int8", limit_s=limit_s)
        return {"source": model, "source_fingerprint": fingerprint, "converter_version": CONVERTER_VERSION}

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
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        message = f"the weights in {folder} cannot be read: {error}"
        raise CatalogError(message, hint="copy the model again") from error
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


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
