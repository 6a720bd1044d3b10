"""Heads inside this package, made whole on first use.

vLLM reads a draft vocabulary's rows of lm_head from the head's own file. Where they were not trained they are the
target's: the package leaves them out, 9 MB of a head for the embedded default, and they are put back here, once. The
matrices of such a head may be FP8, half as large; here they become bf16, the same numbers on every machine:

    $PEAGLE_HOME/heads/<id>-<fingerprint>/    config.json  model.safetensors  README.md

It knows files and the embedded targets; it knows nothing of engines, or of who chooses a head.
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
_TIED_LM_HEAD = "model.embed_tokens.weight"


def find_shipped_head(name: str) -> Path | None:
    """The whole folder of a shipped head, by its id or by the folder's name.

    The name may be from another machine. None for other heads.
    """
    for folder in sorted(HEADS_FOLDER.iterdir()) if HEADS_FOLDER.is_dir() else ():
        if name == folder.name or (_lacks_rows(folder) and name == _whole_folder(folder).name):
            return whole_head(folder)
    return None


def whole_head(folder: Path) -> Path:
    """The folder of a head as vLLM takes it.

    Its own, or a copy with the target's rows of lm_head put back, in bf16.

    Safe when several processes ask at once: each makes the same copy, and one of them stays.

    Args:
        folder: a head, below `HEADS_FOLDER` or not.

    Raises:
        DrafterError: rows are missing, and are not an embedded target's.
        ConfigError: `$PEAGLE_HOME` cannot be written to.
    """
    if not _lacks_rows(folder):
        return folder
    whole = _whole_folder(folder)
    if not whole.exists():
        target = ensure_embedded(target_of(folder))
        try:
            _put_rows_back(folder, target, whole)
        except OSError as error:
            raise ConfigError(
                f"{whole} cannot be written: {error.strerror}",
                hint="free some space, or set PEAGLE_HOME to a folder that you can write to",
            ) from error
    return whole


def without_rows(folder: Path, target: Path, output: Path) -> None:
    """Write a head for the package, without the lm_head rows of its target.

    Raises:
        DrafterError: the rows are not the target's, so leaving them out would lose what was trained.
    """
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / _WEIGHTS)
    rows = tensors.pop(_LM_HEAD)
    if not torch.equal(rows, rows_of(target, tensors["d2t"])):
        raise DrafterError(f"{folder}: its lm_head is not the target's", hint="train it with --no-train-lm-head")
    _copy_with(folder, tensors, output)


def target_of(folder: Path) -> str:
    """The embedded target that a head says it is for.

    Raises:
        DrafterError: another one, or none.
    """
    verifier = (read_config(folder, DrafterError).get("speculators_config") or {}).get("verifier") or {}
    stated = str(verifier.get("name_or_path"))
    name = stated if stated in EMBEDDED_TARGETS else embedded_of_upstream(stated)
    if name is not None:
        return name
    raise DrafterError(
        f"{folder}: a draft vocabulary needs lm_head.weight, and its target is not one that peagle carries",
        hint="save the head with its lm_head",
    )


def _lacks_rows(folder: Path) -> bool:
    if not any(folder.glob("*.safetensors")):
        return False  # whoever loads it says what is missing
    shapes = read_shapes(folder)
    return "d2t" in shapes and _LM_HEAD not in shapes


def _whole_folder(folder: Path) -> Path:
    """The whole folder of a head, named after its sources.

    Another head or another target has another folder.
    """
    key = f"{folder_fingerprint(folder)}:{embedded_folder(target_of(folder)).name}"
    return peagle_home() / HEADS / f"{folder.name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _put_rows_back(folder: Path, target: Path, whole: Path) -> None:
    from safetensors.torch import load_file

    from peagle.fp8 import in_bf16

    tensors = in_bf16(load_file(folder / _WEIGHTS))
    tensors[_LM_HEAD] = rows_of(target, tensors["d2t"])
    whole.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{whole.name}.", dir=whole.parent) as staging:
        head = Path(staging) / whole.name
        _copy_with(folder, tensors, head)
        _state_no_quantization(head / "config.json")
        try:
            head.rename(whole)
        except OSError:
            if not whole.is_dir():  # another process was first, with the same bytes
                raise


def _state_no_quantization(config_file: Path) -> None:
    config = json.loads(config_file.read_text())
    if config.pop("quantization_config", None):
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copy_with(folder: Path, tensors: dict[str, "torch.Tensor"], output: Path) -> None:
    """The head's files, but with these weights."""
    from safetensors.torch import save

    shutil.copytree(folder, output, ignore=shutil.ignore_patterns(_WEIGHTS))
    # `save_file` would make a file that only its owner may read.
    (output / _WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))


def rows_of(target: Path, d2t: "torch.Tensor") -> "torch.Tensor":
    """The target's rows of lm_head for a draft vocabulary.

    The ids are d2t + their index.
    """
    import torch
    from safetensors import safe_open

    with safe_open(target / _WEIGHTS, framework="pt") as weights:
        name = _LM_HEAD if _LM_HEAD in weights.keys() else _TIED_LM_HEAD  # noqa: SIM118 (not a mapping)
        rows: torch.Tensor = weights.get_tensor(name)[d2t + torch.arange(len(d2t))]
        return rows
