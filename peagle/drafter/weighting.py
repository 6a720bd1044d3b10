"""How much each row counts in the loss. Pure functions over a batch.

A draft is thrown away behind its first wrong token, so what a row is worth depends on the rows before it in its chain.
D-PACE (arXiv 2605.18810; `speculators.losses.dpace_loss_decay`) takes the weights from that: with c_d the head's
confidence at depth d, the expected length of the accepted draft is the sum over d of c_0 * ... * c_d, and a row's share
in its gradient, by log c_d, is the sum of those products that it is part of. The weights move with the head: to the
first depths while these are unsure, to the later ones of chains whose beginning is learnt.

Shapes: R rows under the loss, T tokens, D depths.
"""

from dataclasses import dataclass

import torch

from peagle.drafter.batch import Batch

_SMOOTHING = 0.5  # the paper's: confidence c counts as (1 - s) c + s, so that no chain is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How the rows of a training are weighted.

    Attributes:
        depth_decay: a row at depth d counts depth_decay ** d.
        dpace: times its D-PACE weight.
        cod_ratio: share of the chains that COD sampling takes from one depth to the next. D-PACE's products are
            divided by its powers, for the chains that were cut.
    """

    depth_decay: float = 1.0
    dpace: bool = False
    cod_ratio: float = 1.0


def fixed_weight(batch: Batch, weighting: Weighting) -> torch.Tensor:
    """[R] what a row counts by its depth alone, 0 for padding."""
    weight = weighting.depth_decay ** batch.depth_S[batch.row_R].float()
    weight[batch.num_loss_rows :] = 0
    return weight


def dpace_weight(batch: Batch, weighting: Weighting, confidence_R: torch.Tensor) -> torch.Tensor:
    """[R] D-PACE's weights; those of padding mean nothing.

    Args:
        batch: the rows.
        weighting: for its COD ratio.
        confidence_R: the head's probability of the target's likeliest token.
    """
    rows = batch.row_R[: batch.num_loss_rows]
    smoothed_TD = by_chain(batch, (1 - _SMOOTHING) * confidence_R[: batch.num_loss_rows] + _SMOOTHING)
    depth_D = torch.arange(smoothed_TD.shape[1], device=smoothed_TD.device)
    accepted_TD = smoothed_TD.cumprod(1) / weighting.cod_ratio**depth_D
    weight_TD = accepted_TD.flip(1).cumsum(1).flip(1)
    weight = torch.zeros_like(confidence_R)
    weight[: batch.num_loss_rows] = weight_TD[batch.anchor_S[rows], batch.depth_S[rows]]
    return weight


def by_chain(batch: Batch, value_R: torch.Tensor) -> torch.Tensor:
    """[T, D] the rows' values by anchor and depth, 0 where there is no row under the loss.

    Args:
        batch: the rows.
        value_R: without padding.
    """
    rows = batch.row_R[: batch.num_loss_rows]
    anchor, depth = batch.anchor_S[rows], batch.depth_S[rows]
    num_depths = int(batch.depth_S.max()) + 1
    table = value_R.new_zeros(len(batch.token_ids_T), num_depths)
    table[anchor, depth] = value_R
    return table
