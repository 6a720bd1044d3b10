"""Does a drafter head belong to a target: judged from the two `config.json` files, before anything is loaded.

Pure. Reads both layouts in which heads are published: the one of the `speculators` library
(`transformer_layer_config`) and the plain Hugging Face one (`ptd_token_id`, `eagle_config`), by the keys that
vLLM 0.29 reads (`v1/spec_decode/llm_base_proposer.py`, `transformers_utils/configs/speculators/algos.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.engine.spec import DRAFT_METHODS, DraftMethod
from peagle.errors import DrafterError

_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_UNMAPPED_BY_VLLM = ("fc_norm", "norm_output")
# Where a head does not say: the depth of the P-EAGLE launch's quick start, and EAGLE-3's best (vLLM blog, 2026-03-13).
_USUAL_K = {"peagle": 5, "eagle3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """What a head's `config.json` says, whichever layout it has.

    Attributes:
        method: how it drafts.
        target_hidden_size: width of the target's states that it reads.
        vocab_size: of the embedding that it shares with the target.
        draft_vocab_size: how many of those tokens it can draft; all of them where it does not say.
        num_layers: decoder layers of its own; 1 where it does not say.
        aux_layer_ids: layers of the target whose input states it reads; empty leaves the choice to vLLM.
        mask_token_id: stands for the tokens not drafted yet; P-EAGLE only.
        num_speculative_tokens: K that it was saved with, None where it does not say.
        unmapped: parts of the head that vLLM does not load for P-EAGLE.
    """

    method: DraftMethod
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    num_speculative_tokens: int | None
    unmapped: tuple[str, ...]

    @property
    def default_k(self) -> int:
        """K without a measurement: the one it was saved with, else the usual one of its method."""
        return self.num_speculative_tokens or _USUAL_K[self.method]


def read_head(config: Mapping[str, Any]) -> HeadFacts:
    """The facts of a head.

    Raises:
        DrafterError: not a drafter head, of a kind that peagle does not run, or without a size that matters.
    """
    layer = config.get("transformer_layer_config") or config
    method = _method(config)
    hidden_size = config.get("target_hidden_size") or layer.get("hidden_size")
    vocab_size = layer.get("vocab_size")
    if hidden_size is None or vocab_size is None:
        raise DrafterError("the drafter's config.json states no hidden_size or no vocab_size")
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    aux = aux or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    mask_token_id = next((config[key] for key in _MASK_TOKEN_KEYS if config.get(key) is not None), None)
    return HeadFacts(
        method=method,
        target_hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        num_layers=layer.get("num_hidden_layers") or 1,
        aux_layer_ids=tuple(aux),
        mask_token_id=mask_token_id,
        num_speculative_tokens=_saved_k(config),
        unmapped=tuple(key for key in _UNMAPPED_BY_VLLM if config.get(key)),
    )


def check_fit(drafter: Mapping[str, Any], target: Mapping[str, Any]) -> HeadFacts:
    """The head's facts, once it is known to fit.

    Args:
        drafter: the head's `config.json`.
        target: the target's.

    Raises:
        DrafterError: hidden size, vocabulary or layers differ; both values are named.
    """
    head = read_head(drafter)
    text = target.get("text_config") or target
    num_layers = text["num_hidden_layers"]
    _require_equal("hidden size", head.target_hidden_size, text["hidden_size"])
    _require_equal("vocabulary", head.vocab_size, text["vocab_size"])
    # Layer i reads the state entering it; i = num_layers is the state leaving the last.
    if outside := [layer for layer in head.aux_layer_ids if not 0 <= layer <= num_layers]:
        raise _misfit(f"it reads layers {outside}, the target has {num_layers} layers")
    if head.method == "peagle":
        _check_parallel(head)
    return head


def _check_parallel(head: HeadFacts) -> None:
    if head.mask_token_id is None:
        raise DrafterError(
            f"the drafter names no mask token ({', '.join(_MASK_TOKEN_KEYS)}): it cannot draft in parallel",
            hint="was it trained as EAGLE-3? Then its config must not say peagle",
        )
    if not 0 <= head.mask_token_id < head.vocab_size:
        raise _misfit(f"its mask token {head.mask_token_id} lies outside the vocabulary of {head.vocab_size}")
    if head.unmapped:
        raise DrafterError(
            f"vLLM does not load {' and '.join(head.unmapped)} of a P-EAGLE head: its drafts would be wrong",
            hint="train the head without them",
        )


def _method(config: Mapping[str, Any]) -> DraftMethod:
    stated = config.get("speculators_model_type")
    if stated in DRAFT_METHODS:
        return "peagle" if stated == "peagle" else "eagle3"
    if stated is not None:
        raise DrafterError(
            f"the drafter is of type {stated!r}, which peagle does not run",
            hint=f"supported: {', '.join(DRAFT_METHODS)}",
        )
    if any(config.get(key) is not None for key in _MASK_TOKEN_KEYS):
        return "peagle"
    if "eagle3" in str(config.get("architectures")).lower() or "eagle_config" in config:
        return "eagle3"
    raise DrafterError(
        "this is no drafter head: its config.json names neither P-EAGLE nor EAGLE-3",
        hint="give the head's own folder or hub id, not a language model's",
    )


def _saved_k(config: Mapping[str, Any]) -> int | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    k = methods[0].get("speculative_tokens")
    return int(k) if k else None


def _require_equal(what: str, drafter: int, target: int) -> None:
    if drafter != target:
        raise _misfit(f"its {what} is {drafter:,}, the target's is {target:,}")


def _misfit(reason: str) -> DrafterError:
    return DrafterError(
        f"the drafter does not fit the target: {reason}",
        hint="use a head trained for this very model; `peagle models NAME` lists the known ones",
    )
