"""Check that a head's files fit the target and each other, without loading weights.

Supports both layouts of published heads: `speculators` (`transformer_layer_config`) and plain Hugging Face
(`ptd_token_id`, `eagle_config`, `dflash_config`). vLLM 0.29 reads these keys (`v1/spec_decode/llm_base_proposer.py`,
`transformers_utils/configs/speculators/algos.py`) and these names of weights (`model_executor/models/llama_eagle3.py`,
`qwen3_dflash.py`, `qwen3_dspark.py`).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from peagle.engine.spec import BLOCK_METHODS, DRAFT_METHODS, DraftMethod
from peagle.errors import DrafterError

_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
# From P-EAGLE's announcement on the vLLM blog, 2026-03-13: its quick start, and the best K of EAGLE-3 there.
_DEFAULT_K = {"peagle": 5, "eagle3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """The facts of a head's `config.json`, in any layout.

    Attributes:
        target_hidden_size: width of the target's states.
        draft_vocab_size: number of tokens that the head can draft; by default all.
        aux_layer_ids: layers of the target whose inputs the head reads; if empty, vLLM chooses them.
        mask_token_id: token that stands for positions not drafted yet; None for EAGLE-3.
        max_k: largest K, for a head that drafts blocks of a fixed size.
        mixes_attention: whether some layers of the head have a sliding window, and others do not.
        not_loaded: parts of the head that vLLM does not load for P-EAGLE.
    """

    method: DraftMethod
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    num_speculative_tokens: int | None
    max_k: int | None
    mixes_attention: bool
    not_loaded: tuple[str, ...]

    @property
    def default_k(self) -> int:
        return self.num_speculative_tokens or self.max_k or _DEFAULT_K[self.method]


def read_head(config: Mapping[str, Any]) -> HeadFacts:
    layer_config = config.get("transformer_layer_config") or config
    method = _method(config)
    hidden_size = config.get("target_hidden_size") or layer_config.get("hidden_size")
    vocab_size = layer_config.get("vocab_size")
    if hidden_size is None or vocab_size is None:
        raise DrafterError("the drafter's config.json lacks hidden_size or vocab_size")
    block_config = config.get("dflash_config") or {}
    aux_layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    aux_layer_ids = aux_layer_ids or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # These keys name the layer whose output is read, which is the input of the next layer.
    output_layer_ids = block_config.get("target_layer_ids") or config.get("target_layer_ids") or ()
    aux_layer_ids = aux_layer_ids or [layer + 1 for layer in output_layer_ids]
    mask_token_ids = (keys.get(key) for keys in (block_config, config) for key in _MASK_TOKEN_KEYS)
    mask_token_id = next((token_id for token_id in mask_token_ids if token_id is not None), None)
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    k = proposals[0].get("speculative_tokens")
    return HeadFacts(
        method=method,
        target_hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        num_layers=layer_config.get("num_hidden_layers") or 1,
        aux_layer_ids=tuple(aux_layer_ids),
        mask_token_id=mask_token_id,
        num_speculative_tokens=int(k) if k else None,
        max_k=_max_k(method, config),
        mixes_attention=len(set(layer_config.get("layer_types") or ())) > 1,
        not_loaded=tuple(key for key in ("fc_norm", "norm_output") if config.get(key)),
    )


def check_fit(drafter: Mapping[str, Any], target: Mapping[str, Any]) -> HeadFacts:
    """Compare the `config.json` of both: return the head's facts, or raise DrafterError if it does not fit."""
    head = read_head(drafter)
    text_config = target.get("text_config") or target
    num_layers = text_config["num_hidden_layers"]
    for name, size, target_size in (
        ("hidden size", head.target_hidden_size, text_config["hidden_size"]),
        ("vocabulary", head.vocab_size, text_config["vocab_size"]),
    ):
        if size != target_size:
            raise _target_mismatch(f"its {name} is {size:,}, but the target's is {target_size:,}")
    # Layer i refers to its input; i = num_layers refers to the output of the last layer.
    if outside := [layer for layer in head.aux_layer_ids if not 0 <= layer <= num_layers]:
        raise _target_mismatch(f"it reads layers {outside}, but the target has {num_layers} layers")
    if head.method != "eagle3":
        _check_parallel_head(head)
    if head.method == "dspark" and not drafter.get("markov_rank"):
        raise DrafterError("a DSpark head requires a Markov head: its config.json has no markov_rank")
    return head


def _max_k(method: DraftMethod, config: Mapping[str, Any]) -> int | None:
    """Return the largest K of a head that drafts blocks; None for other heads.

    The first position of a block is for a known token, unless the head also predicts a token there.
    """
    if method not in BLOCK_METHODS:
        return None
    block = config.get("dflash_config") or {}
    size = config.get("block_size") or block.get("block_size")
    if not isinstance(size, int) or size < 2:
        raise DrafterError(f"a {method} head requires a block_size of 2 or more in its config.json, not {size!r}")
    predicts_from_first = config.get("sample_from_anchor", block.get("sample_from_anchor", method == "dspark"))
    return size if predicts_from_first else size - 1


def _check_parallel_head(head: HeadFacts) -> None:
    if head.mask_token_id is None:
        raise DrafterError(
            f"the drafter has no mask token ({', '.join(_MASK_TOKEN_KEYS)}), which parallel drafting requires",
            hint="if it was trained as EAGLE-3, its config must not name peagle",
        )
    if not 0 <= head.mask_token_id < head.vocab_size:
        raise _target_mismatch(f"its mask token {head.mask_token_id} is outside the vocabulary of {head.vocab_size}")
    if head.method == "peagle" and head.not_loaded:
        raise DrafterError(
            f"vLLM does not load {' and '.join(head.not_loaded)} of a P-EAGLE head, so its drafts would be wrong",
            hint="train the head without them",
        )


def _method(config: Mapping[str, Any]) -> DraftMethod:
    model_type = config.get("speculators_model_type")
    if model_type in DRAFT_METHODS:
        return cast(DraftMethod, model_type)
    if model_type is not None:
        hint = f"choose from {', '.join(DRAFT_METHODS)}"
        raise DrafterError(f"drafters of type {model_type!r} are not supported", hint=hint)
    architectures = str(config.get("architectures")).lower()
    if "dflash2" in architectures:
        raise DrafterError("DFlash2 heads are not supported", hint=f"choose from {', '.join(DRAFT_METHODS)}")
    if "dspark" in architectures:
        return "dspark"
    if "dflash" in architectures or "dflash_config" in config:
        return "dflash"
    if any(config.get(key) is not None for key in _MASK_TOKEN_KEYS):
        return "peagle"
    if "eagle3" in architectures or "eagle_config" in config:
        return "eagle3"
    raise DrafterError(
        "not a drafter head: its config.json names none of P-EAGLE, EAGLE-3, DFlash and DSpark",
        hint="use the folder or hub id of a head, not of a language model",
    )


def _target_mismatch(reason: str) -> DrafterError:
    return DrafterError(
        f"the drafter does not fit the target: {reason}",
        hint="use a head trained for this model; `peagle models NAME` lists them",
    )


Shapes = Mapping[str, tuple[int, ...]]
_LAYER_NAME = re.compile(r"(?:layers\.(\d+)|midlayer)\.")


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of each tensor in a folder's `*.safetensors`, by name."""
    return {name: shape for name, (_, shape) in _read_headers(folder).items()}


def read_dtypes(folder: Path) -> Mapping[str, str]:
    """Return the dtype of each tensor in a folder's `*.safetensors`, such as `BF16` or `F8_E4M3`, by name."""
    return {name: dtype for name, (dtype, _) in _read_headers(folder).items()}


def check_weights(shapes: Shapes, head: HeadFacts) -> None:
    layers = {int(match[1] or 0) for name in shapes if (match := _LAYER_NAME.match(name))}
    if layers != set(range(head.num_layers)):
        reason = f"config.json has {head.num_layers} layers, but the weights have layers {sorted(layers)}"
        raise _weights_mismatch(reason)
    if head.method == "peagle" and "mask_hidden" not in shapes:
        raise DrafterError(
            "the weights have no mask_hidden, which parallel drafting requires",
            hint="if it was trained as EAGLE-3, its config must not name a mask token",
        )
    width = shapes["fc.weight"][1] if "fc.weight" in shapes else None
    if head.method == "peagle" and (size := math.prod(shapes["mask_hidden"])) != width:
        raise _weights_mismatch(f"mask_hidden has {size:,} values, but fc reads {width or 'nothing'}")
    num_values = len(head.aux_layer_ids) * head.target_hidden_size
    if head.max_k is not None and num_values not in (0, width):
        raise _weights_mismatch(
            f"it reads {num_values:,} values of {len(head.aux_layer_ids)} layers, but fc reads {width or 'nothing'}"
        )
    if head.method == "dspark" and not any(name.startswith("markov_head.") for name in shapes):
        raise _weights_mismatch("the weights of its Markov head are missing")
    has_lm_head = "lm_head.weight" in shapes
    if has_lm_head and shapes["lm_head.weight"][0] != head.draft_vocab_size:
        rows = shapes["lm_head.weight"][0]
        raise _weights_mismatch(f"lm_head has {rows:,} rows for a draft vocabulary of {head.draft_vocab_size:,}")
    if head.draft_vocab_size < head.vocab_size and not (has_lm_head and "d2t" in shapes):
        raise _weights_mismatch(f"a draft vocabulary of {head.draft_vocab_size:,} requires lm_head.weight and d2t")


def _read_headers(folder: Path) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{folder} has no *.safetensors files", hint="save the head's weights as safetensors first")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= 100_000_000:  # the limit of the format
                    raise ValueError("no table of tensors")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "copy the head again"
            raise DrafterError(f"{path} is not a readable safetensors file: {error}", hint=hint) from error
    return tensors


def _weights_mismatch(reason: str) -> DrafterError:
    return DrafterError(
        f"the head's weights do not match its config.json: {reason}", hint="copy or save the head again"
    )
