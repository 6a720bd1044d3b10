"""Convert head folders to FP8 and back, and report the error of the weights.

A head that is converted back to bf16 has the values of the FP8 head, so that a machine without FP8 can measure the
effect of FP8 weights on acceptance. It does not reproduce the quantisation of activations.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.errors import ConfigError, DrafterError, did_you_mean
from peagle.files import converted_write_errors
from peagle.fp8 import (
    FP8,
    MAY_STAY_BF16,
    SCALE,
    WeightError,
    dequantize,
    dequantize_all,
    is_matrix,
    quantization_config,
    quantize,
    reason_to_keep,
    weight_error,
)

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_MODEL_TYPES = ("llama", "qwen3")  # drafters for which vLLM has a quantised class


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    output: Path
    num_bytes_before: int
    num_bytes_after: int
    errors: tuple[WeightError, ...]  # of the converted weights
    kept: dict[str, str]  # tensors that are not converted, with the reason

    def to_dict(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "num_bytes_before": self.num_bytes_before,
            "num_bytes_after": self.num_bytes_after,
            "weights": [error.to_dict() for error in self.errors],
            "kept": self.kept,
        }


def quantize_head(source: Path, output: Path, *, keep: Sequence[str] = ()) -> Conversion:
    for module in keep:
        if module not in MAY_STAY_BF16:
            raise ConfigError(f"--keep {module}: unknown module", hint=did_you_mean(module, MAY_STAY_BF16))
    _require_absent(output)
    config, tensors = _read_head(source)
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization or any(tensor.dtype == FP8 for tensor in tensors.values()):
        method = (quantization or {}).get("quant_method", "FP8")
        hint = "convert the head to bf16 with --dequantize"
        raise DrafterError(f"{source} is already quantised ({method})", hint=hint)
    kept = {
        name: reason for name, tensor in tensors.items() if (reason := reason_to_keep(name, tensor, keep)) is not None
    }
    output_tensors, errors = dict(tensors), []
    for name in tensors.keys() - kept.keys():
        stored, scale = quantize(name, tensors[name])
        output_tensors[name], output_tensors[name + SCALE] = stored, scale
        errors.append(weight_error(name, tensors[name], dequantize(stored, scale), scale))
    if not errors:
        raise DrafterError(f"{source} has no weights that vLLM can load as FP8")
    config["quantization_config"] = quantization_config(tensors, kept)
    unconverted = sorted(name.removesuffix(".weight") for name in kept if is_matrix(name, tensors[name]))
    unconverted_note = f"{', '.join(unconverted)} not converted" if unconverted else "there are no other matrices"
    card_note = (
        f"**FP8**: {len(errors)} matrices in float8_e4m3fn with a scale per output channel; the engine quantises"
        f" activations per token (compressed-tensors); {unconverted_note}. Written by `peagle"
        " quantize-drafter`; acceptance figures below are those of the original head."
    )
    return _write(source, output, config, output_tensors, card_note, errors, kept)


def dequantize_head(source: Path, output: Path) -> Conversion:
    _require_absent(output)
    config, tensors = _read_head(source)
    quantization = config.pop("quantization_config", None) or {}
    names = [name for name, tensor in tensors.items() if tensor.dtype == FP8]
    hint = "use a folder written by `peagle quantize-drafter`"
    if quantization.get("quant_method") != "compressed-tensors" or not names:
        raise DrafterError(f"{source} is not an FP8 head", hint=hint)
    try:
        output_tensors = dequantize_all(tensors)
    except DrafterError as error:
        raise DrafterError(f"{source} is not an FP8 head: {error.message}", hint=hint) from error
    errors = []
    for name in names:
        exact = dequantize(tensors[name], tensors[name + SCALE])
        errors.append(weight_error(name, exact, output_tensors[name], tensors[name + SCALE]))
    kept = dict.fromkeys(output_tensors.keys() - set(names), "not in FP8")
    card_note = (
        "**Converted back to bf16**: the values of the FP8 head, rounded to bf16. Written by `peagle quantize-drafter"
        " --dequantize`, to measure the effect of FP8 weights on acceptance."
    )
    return _write(source, output, config, output_tensors, card_note, errors, kept)


def _require_absent(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"{output} already exists", hint="use another folder, or remove it")


def _read_head(source: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(source, DrafterError)
    if (head := read_head(config)).max_k is not None:
        raise DrafterError(
            f"{source} is a {head.method} head; only P-EAGLE and EAGLE-3 heads are quantised", hint="use it in bf16"
        )
    layers = config.get("transformer_layer_config") or config
    if (model_type := layers.get("model_type", "llama")) not in _MODEL_TYPES:
        raise DrafterError(
            f"{source} is a head of type {model_type!r}", hint=f"vLLM loads FP8 heads of type {', '.join(_MODEL_TYPES)}"
        )
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{source} has no *.safetensors files", hint="save the head's weights as safetensors first")
    try:
        return config, {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise DrafterError(f"{source}: the weights cannot be read: {error}", hint="copy the head again") from error


def _write(
    source: Path,
    output: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    card_note: str,
    errors: list[WeightError],
    kept: dict[str, str],
) -> Conversion:
    """Write a temporary folder next to `output`, and rename it to `output`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with converted_write_errors(output, SafetensorError, hint="free some space, or use another --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            for file in source.iterdir():
                if file.is_file() and not file.name.startswith(".") and not any(map(file.match, _WEIGHT_PATTERNS)):
                    shutil.copyfile(file, staging / file.name)
            ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
            save_file(ordered, staging / "model.safetensors", metadata={"format": "pt"})
            (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            card = staging / "README.md"
            lines = card.read_text(encoding="utf-8").splitlines() if card.is_file() else ["# Drafter head"]
            title_index = next((i for i, line in enumerate(lines) if line.startswith("# ")), len(lines) - 1)
            lines[title_index + 1 : title_index + 1] = ["", card_note]
            card.write_text("\n".join(lines) + "\n", encoding="utf-8")
            for path in (staging, *staging.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            staging.rename(output)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return Conversion(
        output=output,
        num_bytes_before=sum(file.stat().st_size for file in source.glob("*.safetensors")),
        num_bytes_after=(output / "model.safetensors").stat().st_size,
        errors=tuple(sorted(errors, key=lambda error: error.name)),
        kept=dict(sorted(kept.items())),
    )
