"""An acceptance length from the target's states, without an engine.

Walks each greedy response as an engine would: draft K tokens after the last known one, count how many agree with the
response, go on behind the first that does not. The engine computes the same with other kernels; what is left between
the two figures is rounding and the cut at the response's end.
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
    """The logits from which the head drafts K tokens behind each known token.

    Returns:
        anchor_R and depth_R: the row scores token anchor + depth + 2 of the document; [R, V] logits of the draft
        vocabulary.
    """
    anchor, depth, states = _draft_states(head, document, num_speculative_tokens)
    return anchor, depth, states.float() @ head.lm_head.weight.float().T


@torch.no_grad()
def drafted_tokens(head: Any, document: Document, num_speculative_tokens: int) -> torch.Tensor:
    """[T - 1, K] drafted token ids behind each known token, -1 without one.

    Ids are of the target's vocabulary.

    Row t holds the drafts for the tokens t+2, t+3, ... of the document; only rows of the response are filled.
    """
    anchor, depth, states = _draft_states(head, document, num_speculative_tokens)
    num_tokens = len(document.token_ids_T)
    drafted = torch.full((num_tokens - 1 + num_speculative_tokens, num_speculative_tokens), -1)
    drafted[anchor, depth] = drafted_ids(head, states).cpu()
    return drafted[: num_tokens - 1]


def _draft_states(
    head: Any, document: Document, num_speculative_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """anchor_R and depth_R as of `draft_logits`, and the states [R, H] for logits."""
    k = num_speculative_tokens
    # A chain ends with the document: repeat the last token so that the last rows draft all K as well.
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
    """Accepted drafts of each verification step of one response.

    Example: the response (behind a prompt) is 5 6 7 8 and every draft is right, K=2: the first step drafts 6 7 after
    5, accepts both and emits 8 itself; nothing is left. One step, [2].

    Args:
        token_ids: the document.
        drafted: [T - 1, K] from `drafted_tokens`.
        start: index of the response's first token, which prefill emits.
    """
    accepted = []
    known = start
    while known < len(token_ids) - 1:
        coming = token_ids[known + 1 :]
        agreed = 0
        for draft, token in zip(drafted[known - 1].tolist(), coming, strict=False):
            if draft != token:
                break
            agreed += 1
        accepted.append(agreed)
        known += agreed + 1
    return accepted


def estimate_acceptance(
    head: Any, store: Features, documents: Sequence[int], *, num_speculative_tokens: int
) -> SpeculationStats:
    """Acceptance over documents, as a greedy engine would count it.

    Exact only for greedy responses.
    """
    histogram = [0] * (num_speculative_tokens + 1)
    for index in documents:
        (document,) = store.documents([index])
        start = int(document.loss_mask_T.int().argmax())
        drafted = drafted_tokens(head, document, num_speculative_tokens)
        for accepted in walk(document.token_ids_T.tolist(), drafted, start):
            histogram[accepted] += 1
    return SpeculationStats.from_histogram(histogram, sum(histogram) * num_speculative_tokens)
