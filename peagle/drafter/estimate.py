"""Estimate the acceptance length from the target's states, without an engine.

Follows each greedy response like an engine: draft K tokens after the last known one, count how many match the response,
continue after the first mismatch. Differences from an engine's figure come from rounding and from the end of the
response.
"""

from collections.abc import Sequence
from typing import Any

import torch

from peagle.drafter.batch import make_batch, sample_rows
from peagle.drafter.forward import drafted_ids, head_states
from peagle.drafter.store import Document, Features
from peagle.speculation import SpeculationStats


@torch.no_grad()
def draft_logits(
    head: Any, document: Document, num_speculative_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits from which the head drafts K tokens after each known token.

    Returns:
        anchor_R, depth_R and the logits [R, V] over the draft vocabulary. A row predicts token anchor + depth + 2 of
        the document.
    """
    anchor, depth, states = _draft_states(head, document, num_speculative_tokens)
    return anchor, depth, states.float() @ head.lm_head.weight.float().T


@torch.no_grad()
def drafted_tokens(head: Any, document: Document, num_speculative_tokens: int) -> torch.Tensor:
    """Return the drafts after each known token, [T - 1, K], as ids of the target's vocabulary.

    Row t has the drafts for the tokens t+2, t+3, ... of the document. Rows outside the response are -1.
    """
    anchor, depth, states = _draft_states(head, document, num_speculative_tokens)
    num_tokens = len(document.token_ids_T)
    drafted = torch.full((num_tokens - 1 + num_speculative_tokens, num_speculative_tokens), -1)
    drafted[anchor, depth] = drafted_ids(head, states).cpu()
    return drafted[: num_tokens - 1]


def _draft_states(
    head: Any, document: Document, num_speculative_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return anchor_R and depth_R like `draft_logits`, and the states [R, H]."""
    k = num_speculative_tokens
    # Chains end with the document. Repeat the last token so that the last rows draft K tokens too.
    padded = Document(
        token_ids_T=torch.cat([document.token_ids_T, document.token_ids_T[-1:].expand(k)]),
        loss_mask_T=torch.cat([document.loss_mask_T, document.loss_mask_T[-1:].expand(k)]),
        aux_TAH=torch.cat([document.aux_TAH, document.aux_TAH[-1:].expand(k, -1)]),
        last_TH=torch.cat([document.last_TH, document.last_TH[-1:].expand(k, -1)]),
    )
    batch = make_batch([padded], [sample_rows(padded.loss_mask_T[1:], num_depths=k, ratio=1.0)])
    device = head.fc.weight.device
    states = head_states(head, batch.to(device), free_run=True)[: batch.num_loss_rows]
    rows = batch.row_R[: batch.num_loss_rows]
    return batch.anchor_S[rows], batch.depth_S[rows], states


def walk(token_ids: Sequence[int], drafted: torch.Tensor, start: int) -> list[int]:
    """Return the number of accepted drafts of each verification step of a response.

    Example: the response is 5 6 7 8, every draft is right, and K=2. The first step drafts 6 7 after 5, accepts both and
    emits 8: [2].

    Args:
        drafted: from `drafted_tokens`.
        start: index of the response's first token, which prefill emits.
    """
    accepted = []
    known = start
    while known < len(token_ids) - 1:
        num_accepted = 0
        for draft, token in zip(drafted[known - 1].tolist(), token_ids[known + 1 :], strict=False):
            if draft != token:
                break
            num_accepted += 1
        accepted.append(num_accepted)
        known += num_accepted + 1
    return accepted


def estimate_acceptance(
    head: Any, store: Features, documents: Sequence[int], *, num_speculative_tokens: int
) -> SpeculationStats:
    """Estimate the acceptance of a greedy engine over documents. Exact only for greedy responses."""
    histogram = [0] * (num_speculative_tokens + 1)
    for index in documents:
        (document,) = store.documents([index])
        start = int(document.loss_mask_T.int().argmax())
        drafted = drafted_tokens(head, document, num_speculative_tokens)
        for accepted in walk(document.token_ids_T.tolist(), drafted, start):
            histogram[accepted] += 1
    return SpeculationStats.from_histogram(histogram, sum(histogram) * num_speculative_tokens)
