"""Losses between the head's distribution and the target's, in chunks of logits.

Also how much each row counts.

The losses are those of `speculators.losses` over the draft vocabulary, by its names. KL(target || draft), the default,
is fused with the projection: rows are taken in chunks, and the gradient of each chunk is formed while its logits are in
the cache. A plain computation holds several [R, V] float32 tensors: 32 KiB a row each at V = 8,192. The others are the
library's own functions, chunk by chunk.

Shapes: R rows under the loss, P positions they predict from, H hidden size, V draft vocabulary.

A draft is thrown away behind its first wrong token, so what a row is worth depends on the rows before it in its chain.
D-PACE (arXiv 2605.18810; `speculators.losses.dpace_loss_decay`) takes the weights from that: with c_d the head's
confidence at depth d, the expected length of the accepted draft is the sum over d of c_0 * ... * c_d, and a row's share
in its gradient, by log c_d, is the sum of those products that it is part of. The weights move with the head: to the
first depths while these are unsure, to the later ones of chains whose beginning is learnt.

Shapes: R rows under the loss, T tokens, D depths.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from peagle.drafter.batch import TrainingBatch

LOSSES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")  # by the library's names
DEFAULT_LOSS = "kl_div"
CHUNK_ROWS = 256
_GPU_LOGITS = 2**25  # at once, where a GPU's kernels are short and its memory large: 128 MiB each time they are copied


@dataclass(frozen=True, slots=True)
class Targets:
    """The target's side of the loss.

    Attributes:
        state_PH: the target's states AFTER its final norm.
        weight_VH: rows of the target's lm_head for the draft vocabulary.
        softcap: logits are softcap * tanh(logits / softcap), as Gemma's; None where they stay as they are.
    """

    state_PH: torch.Tensor
    weight_VH: torch.Tensor
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class RowLosses:
    """The losses of the rows, in their order.

    Attributes:
        loss: scalar, weighted sum of the rows' losses; the only one with a gradient.
        divergence_R: each row's KL divergence, unweighted, whichever the loss is.
        correct_R: bool, whether the head's likeliest token is the target's.
    """

    loss: torch.Tensor
    divergence_R: torch.Tensor
    correct_R: torch.Tensor


def linear_loss(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets: Targets,
    position_R: torch.Tensor,
    row_weight_R: torch.Tensor,
    *,
    loss: str = DEFAULT_LOSS,
) -> RowLosses:
    """Weighted loss over rows between logits hidden @ W and state @ W_target.

    Args:
        hidden_RH: the head's states after its norm; receives a gradient. Its dtype is that of the products.
        weight_VH: the head's lm_head; receives a gradient when it requires one.
        targets: the target's side.
        position_R: for each row the index in `targets.state_PH`; ascending order saves work.
        row_weight_R: float32 weights.
        loss: one of `LOSSES`.
    """
    outcome = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, targets.state_PH, targets.weight_VH, targets.softcap, position_R, row_weight_R, loss
    )
    return RowLosses(*outcome)


@torch.no_grad()
def greedy_confidence(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, targets: Targets, position_R: torch.Tensor
) -> torch.Tensor:
    """[R] float32 or wider, the head's probability of the target's likeliest token.

    `linear_loss` computes the same logits once more: a trained lm_head's gradient wants the rows' weights, which these
    confidences decide.

    Args:
        hidden_RH: the head's states after its norm.
        weight_VH: the head's lm_head.
        targets: the target's side.
        position_R: for each row the index in `targets.state_PH`; ascending order saves work.
    """
    confidence = hidden_RH.new_empty(len(hidden_RH), dtype=_wide(hidden_RH))
    for rows, which, target_logits, logits in _chunks(hidden_RH, weight_VH, targets, position_R):
        likeliest = target_logits.argmax(-1)[which]
        confidence[rows] = (logits.gather(1, likeliest[:, None])[:, 0] - logits.logsumexp(-1)).exp()
    return confidence


class _LinearLoss(torch.autograd.Function):
    """Forward computes the gradients too; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        state_PH: torch.Tensor,
        target_weight_VH: torch.Tensor,
        target_softcap: float | None,
        position_R: torch.Tensor,
        row_weight_R: torch.Tensor,
        loss: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, wide = hidden_RH.dtype, _wide(hidden_RH)
        weight = weight_VH.to(dtype)
        grad_hidden = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        divergence = hidden_RH.new_empty(len(hidden_RH), dtype=wide)
        row_loss = divergence if loss == "kl_div" else torch.empty_like(divergence)
        correct = hidden_RH.new_empty(len(hidden_RH), dtype=torch.bool)
        targets = Targets(state_PH, target_weight_VH, target_softcap)
        for rows, which, target_logits, logits in _chunks(hidden_RH, weight, targets, position_R):
            target_log_p = target_logits.log_softmax(-1)
            target_p = target_log_p.exp()
            negative_entropy = (target_p * target_log_p).sum(-1)
            correct[rows] = logits.argmax(-1) == target_logits.argmax(-1)[which]
            log_q = logits.log_softmax(-1)
            row_p = target_p[which]
            divergence[rows] = negative_entropy[which] - (row_p * log_q).sum(-1)
            if loss == "kl_div":
                grad_logits = log_q.exp_().sub_(row_p)
            else:
                row_loss[rows], grad_logits = _of_the_library(loss, logits, target_logits[which])
            if grad_hidden is not None:
                grad_logits = grad_logits.mul_(row_weight_R[rows, None]).to(dtype)
                grad_hidden[rows] = grad_logits @ weight
                if grad_weight is not None:
                    grad_weight += (grad_logits.T @ hidden_RH[rows]).to(wide)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(divergence, correct)
        return (row_loss * row_weight_R).sum(), divergence, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden = None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype)
        weight = None if grad_weight is None else grad_weight * grad_loss
        return hidden, weight, None, None, None, None, None, None


@torch.enable_grad()
def _of_the_library(
    loss: str, logits_RV: torch.Tensor, target_logits_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] losses by one of speculators' functions, and gradients by logits [R, V]."""
    from speculators.losses import resolve_loss_config

    ((function, _),) = resolve_loss_config(loss, "eager").values()
    logits_RV = logits_RV.detach().requires_grad_()
    loss_R = function(logits_RV[None], target_logits_RV[None])[0]
    (gradient_RV,) = torch.autograd.grad(loss_R.sum(), logits_RV)
    return loss_R.detach(), gradient_RV


def _chunks(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, targets: Targets, position_R: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Chunks of rows with the target's logits, each row's index, the head's logits."""
    dtype, wide = hidden_RH.dtype, _wide(hidden_RH)
    weight, target_weight = weight_VH.to(dtype), targets.weight_VH.to(dtype)
    num_rows = CHUNK_ROWS if hidden_RH.device.type == "cpu" else max(CHUNK_ROWS, _GPU_LOGITS // len(weight))
    for start in range(0, len(hidden_RH), num_rows):
        rows = slice(start, start + num_rows)
        positions, which = torch.unique_consecutive(position_R[rows], return_inverse=True)
        target_logits = (targets.state_PH[_rounded_up(positions)].to(dtype) @ target_weight.T).to(wide)
        if targets.softcap is not None:
            target_logits = targets.softcap * torch.tanh(target_logits / targets.softcap)
        yield rows, which, target_logits, (hidden_RH[rows] @ weight.T).to(wide)


def _wide(states: torch.Tensor) -> torch.dtype:
    """Of sums and of the softmax."""
    return torch.promote_types(states.dtype, torch.float32)


def _rounded_up(positions: torch.Tensor) -> torch.Tensor:
    """Positions, the last one repeated up to a multiple of 32.

    Few shapes mean few kernels to build.
    """
    return torch.cat([positions, positions[-1:].expand(-len(positions) % 32)])


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


def fixed_weight(batch: TrainingBatch, weighting: Weighting) -> torch.Tensor:
    """[R] what a row counts by its depth alone, 0 for padding."""
    weight = weighting.depth_decay ** batch.depth_S[batch.row_R].float()
    weight[batch.num_loss_rows :] = 0
    return weight


def dpace_weight(batch: TrainingBatch, weighting: Weighting, confidence_R: torch.Tensor) -> torch.Tensor:
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


def by_chain(batch: TrainingBatch, value_R: torch.Tensor) -> torch.Tensor:
    """[T, D] values of rows by anchor and depth, 0 where no row is under the loss.

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
