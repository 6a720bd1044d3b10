"""The head's forward pass over a batch, and its loss. Pure functions over the modules of PEagleDraftModel.

`speculators`' own forward packs documents into one square mask, samples by itself and holds the logits of every row.
This one takes the rows as given, attends document by document, and scores only rows under the loss; for the same rows
the two agree (tests/unit/drafter/test_forward.py).
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from dataclasses import dataclass
from typing import Any

import torch

from peagle.drafter.batch import Batch
from peagle.drafter.loss import RowLosses, Targets, linear_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """Loss of a batch and what it was made of, by depth.

    Attributes:
        loss: scalar with a gradient: the weighted mean divergence over rows.
        correct_D: rows whose likeliest token is the target's.
        rows_D: rows under the loss.
        divergence_D: sum of their divergences.
    """

    loss: torch.Tensor
    correct_D: torch.Tensor
    rows_D: torch.Tensor
    divergence_D: torch.Tensor


def head_states(head: Any, batch: Batch) -> torch.Tensor:
    """The head's states after its norm for the rows under the loss and their padding, [R, H].

    At depth 0 a row holds its token and the projected aux states; deeper, the mask token and the learnt state.
    """
    known = head.fc(batch.aux_TAH.to(head.fc.weight.dtype))
    masked = head.fc(head.mask_hidden[0])
    deeper = (batch.depth_S > 0)[:, None]
    state = torch.where(deeper, masked, known[batch.anchor_S])
    token_ids = torch.where(batch.depth_S > 0, head.mask_token_id, batch.token_ids_T[batch.anchor_S])
    row_states = torch.cat([head.embed_tokens(token_ids).to(state.dtype), state], dim=-1)[None]
    places = batch.place_S[None]
    rotary = head.rotary_emb(row_states, places)
    for layer in head.layers:
        row_states = layer(row_states, attention_mask=batch.masks, position_ids=places, position_embeddings=rotary)
    states: torch.Tensor = head.norm(row_states[0, batch.row_R])
    return states


def batch_loss(head: Any, batch: Batch, *, num_depths: int, depth_decay: float = 1.0) -> BatchLoss:
    """Mean KL divergence over the rows under the loss, a row at depth d weighted by depth_decay ** d."""
    states = head_states(head, batch)
    dtype = torch.get_autocast_dtype(states.device.type) if _autocast_on(states) else states.dtype
    depth = batch.depth_S[batch.row_R]
    weight = depth_decay ** depth.float()
    weight[batch.num_loss_rows :] = 0
    with torch.no_grad():
        target_states = head.verifier_norm(batch.last_PH.to(head.verifier_norm.weight.dtype))
    rows: RowLosses = linear_kl(
        states.to(dtype),
        head.lm_head.weight,
        Targets(target_states.to(dtype), head.verifier_lm_head.weight),
        batch.target_R,
        weight / weight.sum(),
    )
    real = slice(batch.num_loss_rows)
    return BatchLoss(
        loss=rows.loss,
        correct_D=_sum_by_depth(rows.correct_R[real].float(), depth[real], num_depths),
        rows_D=_sum_by_depth(torch.ones_like(rows.divergence_R[real]), depth[real], num_depths),
        divergence_D=_sum_by_depth(rows.divergence_R[real], depth[real], num_depths),
    )


def _autocast_on(tensor: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


def _sum_by_depth(values: torch.Tensor, depth: torch.Tensor, num_depths: int) -> torch.Tensor:
    return values.new_zeros(num_depths).index_add_(0, depth, values.detach())
