"""Targets in INT8, converted once into a folder that vLLM loads.

    $PEAGLE_HOME/targets/<name>-int8-<fingerprint>/    config.json  *.safetensors  tokenizer...
    peagle-manifest.json

Each node converts its own from weights of 16 or 32 bits, and writes a byte for each. `int8_weights.py` does it, and
`converted.py` keeps the folder.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peagle.catalog.converted import ensure_converted, run_converter, tell
from peagle.catalog.folders import folder_fingerprint, peagle_home
from peagle.catalog.int8_weights import is_quantisable, weight_files
from peagle.engine.spec import EngineSpec
from peagle.errors import CatalogError, PrecisionError
from peagle.hardware import Hardware

CONVERTER_VERSION = 1  # raise it when `int8_weights.py` writes something else from the same folder
_LIMIT_S = 600
_BYTES_PER_S = 20e6  # of a slow disk
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HINT = "use --precision auto, or bf16"


def require_convertible(path: str, config: Mapping[str, Any], hardware: Hardware) -> None:
    """Refuse a target that cannot be run in INT8, before anything is spent.

    Only the configuration is known of a hub id that is not on this disk.

    Args:
        path: its folder, or a hub id.
        config: its `config.json`.

    Raises:
        PrecisionError: nothing in it can be converted, or vLLM cannot compute it here.
        CatalogError: its weights cannot be read.
    """
    text = config.get("text_config") or config
    if hardware.platform == "cpu" and "amx_tile" not in hardware.cpu_flags and any(text.get(key) for key in _EXPERTS):
        raise PrecisionError(
            f"vLLM computes experts in int8 on CPUs with AMX alone; this is {hardware.describe()}", hint=_HINT
        )
    if not Path(path).is_dir():
        return
    shapes = _shapes(Path(path))
    fused = next((name for name, shape in shapes.items() if "experts" in name and len(shape) > 2), None)
    if fused is not None:
        raise PrecisionError(
            f"{path} holds its experts in one tensor ({fused}), which cannot be converted to int8", hint=_HINT
        )
    if not any(is_quantisable(name, len(shape)) for name, shape in shapes.items()):
        held = "no linear layers that int8 is for" if shapes else "no *.safetensors to convert to int8"
        raise PrecisionError(f"{path} holds {held}", hint=_HINT)


def ensure_int8(
    model: str, revision: str | None = None, *, announce: Callable[[str], None] = lambda message: None
) -> Path:
    """The folder of a target in INT8.

    It is converted now where it is missing or damaged.

    Safe when several processes ask at once: one converts, the others wait for it.

    Args:
        model: a folder, or a hub id, whose weights are downloaded into the cache of Hugging Face's client.
        revision: of a hub id.
        announce: is told, in a sentence, when a conversion begins.

    Raises:
        CatalogError: the hub's weights are not to be had.
        ConfigError: `$PEAGLE_HOME` cannot be written to.
        PeagleError: the conversion failed.
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
    """The spec with this machine's folder of its target in INT8.

    The target is converted now where there is none yet, and standard error is told. A spec of another precision stays
    as it is.

    Raises:
        CatalogError, ConfigError, PeagleError: as `ensure_int8`.
    """
    if spec.precision != "int8":
        return spec
    folder = ensure_int8(spec.model, spec.revision, announce=tell)
    return dataclasses.replace(spec, model=str(folder), revision=None)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of a model's tensors, from the headers of its safetensors files."""
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
            hint="check the network, or give a local folder",
        ) from error
