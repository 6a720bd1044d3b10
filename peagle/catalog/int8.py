"""Targets in INT8, converted once into a folder that vLLM loads.

    $PEAGLE_HOME/targets/<name>-int8-<fingerprint>/    config.json  *.safetensors  tokenizer...
    peagle-manifest.json

Each node converts its own copy from weights of 16 or 32 bits (`int8_weights.py`).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peagle.catalog.converted import ensure_converted, log_to_stderr, run_converter
from peagle.catalog.folders import folder_fingerprint, peagle_home
from peagle.catalog.int8_weights import is_quantisable, weight_files
from peagle.engine.spec import EngineSpec
from peagle.errors import CatalogError, PrecisionError
from peagle.hardware import Hardware

CONVERTER_VERSION = 1  # increment when the output of `int8_weights.py` changes
_LIMIT_S = 600
_BYTES_PER_S = 20e6  # of a slow disk
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HINT = "use --precision auto, or bf16"


def require_convertible(path: str, config: Mapping[str, Any], hardware: Hardware) -> None:
    """Check that a target can run in INT8. For a hub id, only the configuration is checked.

    Args:
        path: folder or hub id of the target.
        config: its `config.json`.
    """
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
            f"{path} has its experts in one tensor ({fused}), which cannot be converted to int8", hint=_HINT
        )
    if not any(is_quantisable(name, len(shape)) for name, shape in shapes.items()):
        reason = "no linear layers to convert to int8" if shapes else "no *.safetensors to convert to int8"
        raise PrecisionError(f"{path} has {reason}", hint=_HINT)


def ensure_int8(
    model: str, revision: str | None = None, *, announce: Callable[[str], None] = lambda message: None
) -> Path:
    """Return the folder of a target in INT8 after converting it if it is missing or damaged.

    Safe for concurrent processes: one converts, the others wait.

    Args:
        model: a folder, or a hub id, which is downloaded into the Hugging Face cache.
        revision: of a hub id.
        announce: receives messages about slow operations.
    """
    source = Path(model) if Path(model).is_dir() else _downloaded(model, revision)
    fingerprint = folder_fingerprint(source)
    key = f"{fingerprint}:{CONVERTER_VERSION}"
    name = f"{Path(model).name}-int8"
    folder = peagle_home() / "targets" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def fill(out: Path) -> dict[str, Any]:
        limit_s = _LIMIT_S + int(sum(file.stat().st_size for file in weight_files(source)) / _BYTES_PER_S)
        arguments = [str(source), str(out)]
        run_converter("peagle.catalog.int8_weights", arguments, what=f"{model} to int8", limit_s=limit_s)
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
