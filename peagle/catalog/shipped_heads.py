"""Heads shipped in this package. An omitted lm_head is added in `$PEAGLE_HOME/heads/<id>-<fingerprint>/`.

vLLM requires a head with a draft vocabulary to contain the lm_head rows of that vocabulary. Untrained rows equal the
target's, so the package omits them; this saves 9 MB for the default model's head. On first use, the rows are copied
from the target, and FP8 matrices are converted to bf16.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.catalog.embedded import EMBEDDED_TARGETS, embedded_folder, embedded_of_upstream, ensure_embedded
from peagle.catalog.folders import folder_fingerprint, peagle_home, read_config
from peagle.catalog.head_files import read_shapes
from peagle.errors import ConfigError, DrafterError

if TYPE_CHECKING:
    import torch

HEADS = "heads"
HEADS_FOLDER = Path(__file__).parent / HEADS

_WEIGHTS = "model.safetensors"
_LM_HEAD = "lm_head.weight"


def find_shipped_head(name: str) -> Path | None:
    """Return the complete folder of a shipped head, or None.

    `name` is the head's id, or the name of its completed folder, which is the same on every machine.
    """
    for folder in sorted(HEADS_FOLDER.iterdir()) if HEADS_FOLDER.is_dir() else ():
        if name == folder.name or (_lacks_lm_head(folder) and name == _complete_folder(folder).name):
            return complete_head(folder)
    return None


def complete_head(folder: Path) -> Path:
    """Return a folder that vLLM can load: the given folder, or a bf16 copy with the target's rows of lm_head.

    Safe for concurrent processes, which create identical copies.
    """
    if not _lacks_lm_head(folder):
        return folder
    complete_folder = _complete_folder(folder)
    if not complete_folder.exists():
        target = ensure_embedded(target_of(folder))
        try:
            _restore_rows(folder, target, complete_folder)
        except OSError as error:
            raise ConfigError(
                f"{complete_folder} cannot be written: {error.strerror}",
                hint="free some space, or set PEAGLE_HOME to a folder that you can write to",
            ) from error
    return complete_folder


def without_rows(folder: Path, target: Path, output: Path) -> None:
    """Write a copy of a head without its lm_head rows. Raises DrafterError if the rows differ from the target's."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / _WEIGHTS)
    rows = tensors.pop(_LM_HEAD)
    if not torch.equal(rows, rows_of(target, tensors["d2t"])):
        raise DrafterError(f"{folder}: its lm_head differs from the target's", hint="train it with --no-train-lm-head")
    _copy_with_weights(folder, tensors, output)


def target_of(folder: Path) -> str:
    """Return the name of a head's embedded target (a target inside a Python package)."""
    verifier = (read_config(folder, DrafterError).get("speculators_config") or {}).get("verifier") or {}
    verifier_name = str(verifier.get("name_or_path"))
    name = verifier_name if verifier_name in EMBEDDED_TARGETS else embedded_of_upstream(verifier_name)
    if name is not None:
        return name
    raise DrafterError(
        f"{folder}: a draft vocabulary requires lm_head.weight, unless the target is embedded",
        hint="save the head with its lm_head",
    )


def _lacks_lm_head(folder: Path) -> bool:
    if not any(folder.glob("*.safetensors")):
        return False  # loading the head reports missing files
    shapes = read_shapes(folder)
    return "d2t" in shapes and _LM_HEAD not in shapes


def _complete_folder(folder: Path) -> Path:
    key = f"{folder_fingerprint(folder)}:{embedded_folder(target_of(folder)).name}"
    return peagle_home() / HEADS / f"{folder.name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _restore_rows(folder: Path, target: Path, complete: Path) -> None:
    from safetensors.torch import load_file

    from peagle.fp8 import dequantize_all

    tensors = dequantize_all(load_file(folder / _WEIGHTS))
    tensors[_LM_HEAD] = rows_of(target, tensors["d2t"])
    complete.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{complete.name}.", dir=complete.parent) as staging:
        head = Path(staging) / complete.name
        _copy_with_weights(folder, tensors, head)
        config_file = head / "config.json"
        config = json.loads(config_file.read_text())
        if config.pop("quantization_config", None):
            config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        try:
            head.rename(complete)
        except OSError:
            if not complete.is_dir():  # another process created the same folder first
                raise


def _copy_with_weights(folder: Path, tensors: dict[str, "torch.Tensor"], output: Path) -> None:
    from safetensors.torch import save

    shutil.copytree(folder, output, ignore=shutil.ignore_patterns(_WEIGHTS))
    # `save_file` would create a file that only its owner can read.
    (output / _WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))


def rows_of(target: Path, d2t: "torch.Tensor") -> "torch.Tensor":
    """Return the target's lm_head rows of a draft vocabulary."""
    import torch
    from safetensors import safe_open

    with safe_open(target / _WEIGHTS, framework="pt") as weights:
        name = _LM_HEAD if _LM_HEAD in weights.keys() else "model.embed_tokens.weight"  # noqa: SIM118 (not a mapping)
        rows: torch.Tensor = weights.get_tensor(name)[d2t + torch.arange(len(d2t))]
        return rows
