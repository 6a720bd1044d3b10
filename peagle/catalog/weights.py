"""Do a head's weights hold what its `config.json` promises: judged from names and shapes alone.

A safetensors file begins with a table of its tensors, so nothing is loaded. The names are those that vLLM 0.29 reads
(`model_executor/models/llama_eagle3.py`); where one is missing its engines stop late or, worse, draft noise.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from peagle.catalog.fit import HeadFacts
from peagle.errors import DrafterError

Shapes = Mapping[str, tuple[int, ...]]
_Table = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name

_LENGTH_BYTES = 8
_LARGEST_TABLE_BYTES = 100_000_000  # the format's own limit
_LAYER = re.compile(r"(?:layers\.(\d+)|midlayer)\.")


def read_shapes(folder: Path) -> Shapes:
    """The shape of each tensor in a folder's `*.safetensors`, by name.

    Raises:
        DrafterError: there are none, or one is damaged.
    """
    return {name: shape for name, (_, shape) in _read_tables(folder).items()}


def read_dtypes(folder: Path) -> Mapping[str, str]:
    """The dtype of each tensor in a folder's `*.safetensors`, by name, as they call it: `BF16`, `F8_E4M3`.

    Raises:
        DrafterError: there are none, or one is damaged.
    """
    return {name: dtype for name, (dtype, _) in _read_tables(folder).items()}


def check_weights(shapes: Shapes, head: HeadFacts) -> None:
    """Refuse a head whose weights are not those of its configuration.

    Raises:
        DrafterError: layers, the mask state, or rows of lm_head are missing; says which.
    """
    layers = {int(match[1] or 0) for name in shapes if (match := _LAYER.match(name))}
    if layers != set(range(head.num_layers)):
        raise _mismatch(f"config.json says {head.num_layers} layers, the weights hold {sorted(layers)}")
    if head.method == "peagle":
        _check_mask_state(shapes)
    has_lm_head = "lm_head.weight" in shapes
    if has_lm_head and shapes["lm_head.weight"][0] != head.draft_vocab_size:
        rows = shapes["lm_head.weight"][0]
        raise _mismatch(f"lm_head has {rows:,} rows for a draft vocabulary of {head.draft_vocab_size:,}")
    if head.draft_vocab_size < head.vocab_size and not (has_lm_head and "d2t" in shapes):
        raise _mismatch(f"a draft vocabulary of {head.draft_vocab_size:,} needs lm_head.weight and d2t")


def _check_mask_state(shapes: Shapes) -> None:
    if "mask_hidden" not in shapes:
        raise DrafterError(
            "the weights hold no mask_hidden: the head cannot draft in parallel",
            hint="was it trained as EAGLE-3? Then its config must name no mask token",
        )
    width = shapes["fc.weight"][1] if "fc.weight" in shapes else None
    if math.prod(shapes["mask_hidden"]) != width:
        raise _mismatch(f"mask_hidden has {math.prod(shapes['mask_hidden']):,} values, fc reads {width or 'nothing'}")


def _read_tables(folder: Path) -> _Table:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{folder} holds no *.safetensors", hint="save the head's weights as safetensors first")
    return {name: entry for file in files for name, entry in _read_table(file).items()}


def _read_table(path: Path) -> _Table:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= _LARGEST_TABLE_BYTES:
                raise ValueError("no table of tensors")
            table = json.loads(file.read(length))
            return {
                name: (entry["dtype"], tuple(entry["shape"])) for name, entry in table.items() if name != "__metadata__"
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DrafterError(f"{path} is not a readable safetensors file: {error}", hint="copy the head again") from error


def _mismatch(reason: str) -> DrafterError:
    return DrafterError(
        f"the head's weights do not match its config.json: {reason}", hint="copy or save the head again"
    )
