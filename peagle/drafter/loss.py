"""The loss between the head's and the target's distributions over the draft vocabulary, and the weight of each row.

The loss is KL(target || draft), fused with the projection: the gradient of each chunk of rows is computed while the
chunk's logits are in the cache. An unfused loss would store several float32 tensors [R, V]; with V = 8,192, each takes
32 KiB per row.

Shapes: R rows with a loss, P positions that these rows predict, H hidden size, V draft vocabulary, T tokens, D depths.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from peagle.drafter.batch import TrainingBatch

CHUNK_ROWS = 256
_GPU_CHUNK_LOGITS = 2**25  # logits per chunk on a GPU, which needs larger kernels: 128 MiB per copy
_SMOOTHING = 0.5  # s of the D-PACE paper: confidence c becomes (1 - s) c + s, so that every chain has some weight


@dataclass(frozen=True, slots=True)
class Targets:
    """The target's states and lm_head, from which its logits are computed."""

    state_PH: torch.Tensor
    weight_VH: torch.Tensor
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap), as in Gemma; None disables it


@dataclass(frozen=True, slots=True)
class RowLosses:
    """The loss, and its parts by row."""

    loss: torch.Tensor  # scalar, weighted sum of the rows' divergences; the only field with a gradient
    divergence_R: torch.Tensor
    correct_R: torch.Tensor  # whether the head's most likely token is the target's


def linear_loss(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets: Targets,
    position_R: torch.Tensor,
    row_weight_R: torch.Tensor,
) -> RowLosses:
    """Return the weighted KL divergence of the head's logits (hidden @ W) from the target's (state @ W_target).

    Args:
        hidden_RH: the head's states after its norm; receives a gradient. Matrix products use its dtype.
        weight_VH: the head's lm_head; receives a gradient if it requires one.
        position_R: index in `targets.state_PH` of each row; ascending order is faster.
    """
    losses = _LinearLoss.apply(hidden_RH, weight_VH, targets, position_R, row_weight_R)  # type: ignore[no-untyped-call]
    return RowLosses(*losses)


@torch.no_grad()
def greedy_confidence(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, targets: Targets, position_R: torch.Tensor
) -> torch.Tensor:
    """Return the probability that the head gives to the target's most likely token, [R]."""
    # `linear_loss` computes these logits again, because the row weights must be known before the gradients.
    confidence = hidden_RH.new_empty(len(hidden_RH), dtype=_accumulation_dtype(hidden_RH))
    for rows, index, target_logits, logits in _chunks(hidden_RH, weight_VH, targets, position_R):
        most_likely = target_logits.argmax(-1)[index]
        confidence[rows] = (logits.gather(1, most_likely[:, None])[:, 0] - logits.logsumexp(-1)).exp()
    return confidence


@torch.no_grad()
def overlap(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, targets: Targets, position_R: torch.Tensor
) -> torch.Tensor:
    """Return the overlap of the head's and the target's distributions: the probability that a draft is accepted.

    `linear_loss` computes these logits again.
    """
    overlaps = hidden_RH.new_empty(len(hidden_RH), dtype=_accumulation_dtype(hidden_RH))
    for rows, index, target_logits, logits in _chunks(hidden_RH, weight_VH, targets, position_R):
        overlaps[rows] = torch.minimum(target_logits.softmax(-1)[index], logits.softmax(-1)).sum(-1)
    return overlaps


class _LinearLoss(torch.autograd.Function):
    """Computes the gradients in forward; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets: Targets,
        position_R: torch.Tensor,
        row_weight_R: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, sum_dtype = hidden_RH.dtype, _accumulation_dtype(hidden_RH)
        weight = weight_VH.to(dtype)
        grad_hidden = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        divergence = hidden_RH.new_empty(len(hidden_RH), dtype=sum_dtype)
        correct = hidden_RH.new_empty(len(hidden_RH), dtype=torch.bool)
        for rows, index, target_logits, logits in _chunks(hidden_RH, weight, targets, position_R):
            target_log_p = target_logits.log_softmax(-1)
            target_p = target_log_p.exp()
            negative_entropy = (target_p * target_log_p).sum(-1)
            correct[rows] = logits.argmax(-1) == target_logits.argmax(-1)[index]
            log_q = logits.log_softmax(-1)
            row_p = target_p[index]
            divergence[rows] = negative_entropy[index] - (row_p * log_q).sum(-1)
            if grad_hidden is not None:
                grad_logits = log_q.exp_().sub_(row_p).mul_(row_weight_R[rows, None]).to(dtype)
                grad_hidden[rows] = grad_logits @ weight
                if grad_weight is not None:
                    grad_weight += (grad_logits.T @ hidden_RH[rows]).to(sum_dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(divergence, correct)
        return (divergence * row_weight_R).sum(), divergence, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype)
        scaled_weight = None if grad_weight is None else grad_weight * grad_loss
        return scaled_hidden, scaled_weight, None, None, None


def _chunks(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, targets: Targets, position_R: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each chunk: the rows, their indices in the target's logits, the target's logits, the head's logits."""
    dtype, sum_dtype = hidden_RH.dtype, _accumulation_dtype(hidden_RH)
    weight, target_weight = weight_VH.to(dtype), targets.weight_VH.to(dtype)
    num_rows = CHUNK_ROWS if hidden_RH.device.type == "cpu" else max(CHUNK_ROWS, _GPU_CHUNK_LOGITS // len(weight))
    for start in range(0, len(hidden_RH), num_rows):
        rows = slice(start, start + num_rows)
        positions, index = torch.unique_consecutive(position_R[rows], return_inverse=True)
        # Rounded up to a multiple of 32, since kernels must be built for each distinct shape.
        positions = torch.cat([positions, positions[-1:].expand(-len(positions) % 32)])
        target_logits = (targets.state_PH[positions].to(dtype) @ target_weight.T).to(sum_dtype)
        if targets.softcap is not None:
            target_logits = targets.softcap * torch.tanh(target_logits / targets.softcap)
        yield rows, index, target_logits, (hidden_RH[rows] @ weight.T).to(sum_dtype)


def _accumulation_dtype(states: torch.Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How the rows of a training run are weighted."""

    depth_decay: float = 1.0  # a row at depth d has the weight depth_decay ** d
    dpace: bool = False
    # Share of chains that COD sampling keeps from one depth to the next. Blocks keep all depths; for them, the share
    # is a factor of `depth_decay`. D-PACE divides products by powers of the share, to account for dropped chains.
    cod_ratio: float = 1.0


def fixed_weight(batch: TrainingBatch, weighting: Weighting) -> torch.Tensor:
    """Return the weight of each row by its depth, [R]; 0 for padding."""
    weight = weighting.depth_decay ** batch.depth_S[batch.row_R].float()
    weight[batch.num_loss_rows :] = 0
    return weight


def dpace_weight(batch: TrainingBatch, weighting: Weighting, confidence_R: torch.Tensor) -> torch.Tensor:
    """Return the D-PACE weight of each row, [R]; undefined for padding.

    A draft is discarded after its first rejected token, so the value of a row depends on the earlier rows of its chain.
    D-PACE (arXiv 2605.18810; `speculators.losses.dpace_loss_decay`) weights rows accordingly. With c_d the head's
    confidence at depth d, the expected accepted length is the sum over d of c_0 * ... * c_d. The weight of a row is
    the derivative with respect to log c_d: the sum of the products that contain c_d.
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
    """Arrange values of rows (without padding) by anchor and depth, [T, D]; 0 if there is no row with a loss."""
    rows = batch.row_R[: batch.num_loss_rows]
    table = value_R.new_zeros(len(batch.token_ids_T), int(batch.depth_S.max()) + 1)
    table[batch.anchor_S[rows], batch.depth_S[rows]] = value_R
    return table
