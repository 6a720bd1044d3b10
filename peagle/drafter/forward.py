"""The forward pass of a head over a batch, and its loss.

These functions use the modules of `speculators`' models, but not their forward passes, which pack documents into one
square mask, sample rows themselves, and store the logits of every row. Here, the caller passes the rows (one for each
anchor and depth, see `batch.py`), each document attends only to itself, and logits are computed only for rows with a
loss. For the same rows, the results are equal (tests/unit/drafter/test_forward.py).

A P-EAGLE head computes all depths in one pass, an EAGLE-3 head one depth after another. In an EAGLE-3 head, the row at
depth d reads the token d positions after the anchor, and the head's own state at depth d - 1 of the same chain. In
training, the token is the document's (teacher forcing, as in `speculators`); in an engine it is a draft of the head.
A DFlash or DSpark head computes whole blocks in one pass. Only DSpark's Markov head reads the previous token: in
training the document's, in an engine its own draft.

Shapes: T tokens, S rows, R rows with a loss, P positions with a loss, A aux layers, D depths, H hidden size, N blocks,
B rows of a block, V draft vocabulary.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from peagle.drafter.attention import (
    DocumentPlan,
    block_attention_plan,
    parallel_attention_plan,
    sequential_attention_plan,
)
from peagle.drafter.batch import TrainingBatch, make_batch, sample_blocks, sample_rows
from peagle.drafter.features import Document, Features
from peagle.drafter.loss import (
    CHUNK_ROWS,
    RowLosses,
    Targets,
    Weighting,
    by_chain,
    dpace_weight,
    fixed_weight,
    greedy_confidence,
    linear_loss,
    overlap,
)
from peagle.engine.spec import BLOCK_METHODS
from peagle.speculation import SpeculationStats


def sequential_states(head: Any, batch: TrainingBatch, *, free_run: bool) -> torch.Tensor:
    """Return an EAGLE-3 head's states of all rows before its norm, [S, H]. For `free_run`, see `head_states`."""
    known_states = head.fc(batch.aux_TAH.to(head.fc.weight.dtype))
    cache = _Cache()
    outputs: list[torch.Tensor] = []
    depth_S = batch.depth_S[: sum(map(len, batch.documents))]  # without the padding
    rows_of_depth = [torch.nonzero(depth_S == depth).flatten() for depth in range(int(depth_S.max()) + 1)]
    state, token_ids = (
        known_states[batch.anchor_S[rows_of_depth[0]]],
        batch.token_ids_T[batch.anchor_S[rows_of_depth[0]]],
    )
    for depth, rows in enumerate(rows_of_depth):
        if depth:
            previous = rows_of_depth[depth - 1]
            row_by_anchor = batch.anchor_S.new_full((len(batch.token_ids_T),), -1)
            row_by_anchor[batch.anchor_S[previous]] = torch.arange(len(previous), device=row_by_anchor.device)
            state = outputs[-1][row_by_anchor[batch.anchor_S[rows]]]
            if free_run:
                token_ids = most_likely_drafts(head, head.norm(state))
            else:
                token_ids = batch.token_ids_T[batch.anchor_S[rows] + batch.depth_S[rows]]
        plan = sequential_attention_plan(batch.documents, depth).to(state.device)
        states = torch.cat([head.embed_tokens(token_ids).to(state.dtype), state], dim=-1)[None]
        position_ids = batch.row_position[rows][None]
        rotary = head.rotary_emb(states, position_ids)
        for layer in head.layers:
            states = layer(
                states,
                attention_mask=plan,
                position_ids=position_ids,
                position_embeddings=rotary,
                past_key_values=cache,
            )
        outputs.append(states[0])
    original_order = torch.cat(rows_of_depth).argsort()
    return F.pad(torch.cat(outputs)[original_order], (0, 0, 0, len(batch.depth_S) - len(original_order)))


def most_likely_drafts(head: Any, states: torch.Tensor, previous_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return the most likely draft after each state, as token ids of the target.

    Args:
        previous_ids: the token before each draft, for DSpark's Markov head.
    """
    chunks = []
    for start in range(0, len(states), CHUNK_ROWS):  # since the logits of a long document are gigabytes
        rows = slice(start, start + CHUNK_ROWS)
        logits = head.lm_head(states[rows])
        if previous_ids is not None:
            previous = head.markov_head.prev_embeddings(previous_ids[rows].to(states.device))
            logits = logits + head.markov_head.markov_w2(previous)
        chunks.append(logits.argmax(-1))
    draft_ids = torch.cat(chunks)
    return draft_ids + head.d2t[draft_ids] if head.d2t is not None else draft_ids


class _Cache:
    """Keys and values of earlier depths, as a cache for transformers' layers."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self._layers:
            old_key, old_value = self._layers[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self._layers[layer] = key, value
        return key, value


_EQUAL_WEIGHTS = Weighting()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """The loss of a batch, and sums over rows by depth."""

    # Scalar with a gradient: the sum of the weighted losses of the rows, divided by the total fixed weight of the step.
    # With D-PACE, the result is not a mean, and is only comparable to other D-PACE losses. DSpark's loss includes the
    # loss of its confidence head.
    loss: torch.Tensor
    correct_D: torch.Tensor  # number of rows whose most likely draft is the target's
    accepted_D: torch.Tensor  # number of rows that are correct along with all earlier rows of their chain
    rows_D: torch.Tensor
    divergence_D: torch.Tensor

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device | str) -> "BatchLoss":
        by_depth = {f.name: torch.zeros(num_depths, device=device) for f in fields(cls) if f.name != "loss"}
        return cls(loss=torch.zeros((), device=device), **by_depth)

    def __add__(self, other: "BatchLoss") -> "BatchLoss":
        """Add the losses of two batches, without gradients."""
        return BatchLoss(
            **{f.name: getattr(self, f.name).detach() + getattr(other, f.name).detach() for f in fields(self)}
        )


def head_states(head: Any, batch: TrainingBatch, *, free_run: bool = False) -> torch.Tensor:
    """Return the head's states after its norm, [R, H], for the rows with a loss and their padding.

    With `free_run`, an EAGLE-3 head reads its own drafts, as in an engine, instead of the document's tokens. Other
    heads ignore it, because their states depend on no token after the anchor.
    """
    if is_block_head(head):
        states = block_states(head, batch)
    elif head.config.speculators_model_type == "peagle":
        states = parallel_states(head, batch)
    else:
        states = sequential_states(head, batch, free_run=free_run)
    normed: torch.Tensor = head.norm(states[batch.row_R])
    return normed


def is_block_head(head: Any) -> bool:
    return head.config.speculators_model_type in BLOCK_METHODS


@dataclass(frozen=True, slots=True)
class ParallelRows:
    """The inputs of a P-EAGLE head's layers."""

    # [1, S, 2 H], embedding and state. At depth 0 these are the embedding of the row's token and the projected aux
    # states; at other depths, the embedding of the mask token and the learned state.
    states: torch.Tensor
    position_ids: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    plan: DocumentPlan

    def apply(self, layer: Any, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(
            states, attention_mask=self.plan, position_ids=self.position_ids, position_embeddings=self.rotary
        )
        return output


def parallel_rows(head: Any, batch: TrainingBatch) -> ParallelRows:
    known_states = head.fc(batch.aux_TAH.to(head.fc.weight.dtype))
    mask_state = head.fc(head.mask_hidden[0])
    is_masked = (batch.depth_S > 0)[:, None]
    state = torch.where(is_masked, mask_state, known_states[batch.anchor_S])
    token_ids = torch.where(batch.depth_S > 0, head.mask_token_id, batch.token_ids_T[batch.anchor_S])
    states = torch.cat([head.embed_tokens(token_ids).to(state.dtype), state], dim=-1)[None]
    position_ids = batch.row_position[None]
    plan = parallel_attention_plan(batch.documents).to(states.device)
    return ParallelRows(states, position_ids, head.rotary_emb(states, position_ids), plan)


def parallel_states(head: Any, batch: TrainingBatch) -> torch.Tensor:
    """Return a P-EAGLE head's states of all rows before its norm, [S, H]."""
    rows = parallel_rows(head, batch)
    states = rows.states
    for layer in head.layers:
        states = rows.apply(layer, states)
    return states[0]


def block_states(head: Any, batch: TrainingBatch) -> torch.Tensor:
    """Return a DFlash or DSpark head's states of all rows before its norm, [S, H].

    A DFlash block starts with an additional row, which reads the known token and drafts nothing. In a DSpark block,
    the row at depth 0 reads the known token. All other rows read the mask token.
    """
    num_depths = int(batch.documents[0].depth_S.max()) + 1
    block_size = num_depths + (0 if head.config.sample_from_anchor else 1)
    anchor_N = batch.anchor_S[: sum(map(len, batch.documents)) : num_depths]
    token_ids_NB = anchor_N.new_full((len(anchor_N), block_size), head.mask_token_id)
    token_ids_NB[:, 0] = batch.token_ids_T[anchor_N]
    offset_B = torch.arange(1, block_size + 1, device=anchor_N.device)  # the context ends with the anchor
    position_NB = batch.document_position_T[anchor_N, None] + offset_B
    position_ids = torch.cat([batch.document_position_T, position_NB.flatten()])[None]
    plan = block_attention_plan(
        batch.documents, batch.starts, num_context=len(batch.token_ids_T), block_size=block_size
    ).to(anchor_N.device)
    context = head.hidden_norm(head.fc(batch.aux_TAH.to(head.fc.weight.dtype)))[None]
    states = head.embed_tokens(token_ids_NB.flatten())[None]
    rotary = head.rotary_emb(states, position_ids)
    for layer in head.layers:
        states = layer(
            hidden_states=states,
            target_hidden=context,
            attention_mask=plan,
            position_ids=position_ids,
            position_embeddings=rotary,
        )
    drafted = states.view(len(anchor_N), block_size, -1)[:, -num_depths:].flatten(0, 1)
    return F.pad(drafted, (0, 0, 0, len(batch.depth_S) - len(drafted)))


def _states_and_weights(head: Any, batch: TrainingBatch, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of the rows with a loss, and the output weights that turn them into logits.

    DSpark's Markov head adds columns to both: embeddings of the tokens before the drafts, and its own outputs.
    """
    markov = getattr(head, "markov_head", None)
    if markov is None:
        return states, head.lm_head.weight
    previous = batch.token_ids_T[batch.anchor_S[batch.row_R] + batch.depth_S[batch.row_R]]
    return (
        torch.cat([states, markov.prev_embeddings(previous).to(states.dtype)], dim=-1),
        torch.cat([head.lm_head.weight, markov.markov_w2.weight], dim=1),
    )


def batch_loss(
    head: Any,
    batch: TrainingBatch,
    *,
    num_depths: int,
    weighting: Weighting = _EQUAL_WEIGHTS,
    total_weight: torch.Tensor | None = None,
) -> BatchLoss:
    """Return the weighted sum of the rows' losses, divided by `total_weight`.

    `total_weight` is the fixed weight of the whole step; None means that the batch is the whole step.
    """
    states, weight_VH = _states_and_weights(head, batch, head_states(head, batch))
    dtype = states.dtype
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states = states.to(dtype)
    with torch.no_grad():
        target_states = head.verifier_norm(batch.last_PH.to(head.verifier_norm.weight.dtype))
    targets = Targets(target_states.to(dtype), head.verifier_lm_head.weight, head.verifier_softcap)
    weight = fixed_weight(batch, weighting)
    total = weight.sum() if total_weight is None else total_weight
    confidence_loss: torch.Tensor | float = 0.0
    if getattr(head, "confidence_head", None) is not None:
        acceptance = overlap(states, weight_VH, targets, batch.position_R)
        confidence_loss = F.binary_cross_entropy_with_logits(
            head.confidence_head(states).to(acceptance.dtype), acceptance, weight / total, reduction="sum"
        )
    if weighting.dpace:
        confidence = greedy_confidence(states, weight_VH, targets, batch.position_R)
        weight = weight * dpace_weight(batch, weighting, confidence)
    row_losses: RowLosses = linear_loss(states, weight_VH, targets, batch.position_R, weight / total)
    unpadded = slice(batch.num_loss_rows)
    row_R, correct = batch.row_R[unpadded], row_losses.correct_R[unpadded].float()
    depth = batch.depth_S[row_R]
    accepted = by_chain(batch, correct).cumprod(1)[batch.anchor_S[row_R], depth]
    return BatchLoss(
        loss=row_losses.loss + confidence_loss,
        correct_D=_sum_by_depth(correct, depth, num_depths),
        accepted_D=_sum_by_depth(accepted, depth, num_depths),
        rows_D=_sum_by_depth(torch.ones_like(correct), depth, num_depths),
        divergence_D=_sum_by_depth(row_losses.divergence_R[unpadded], depth, num_depths),
    )


def _sum_by_depth(values: torch.Tensor, depth: torch.Tensor, num_depths: int) -> torch.Tensor:
    return values.new_zeros(num_depths).index_add_(0, depth, values.detach())


@torch.no_grad()
def drafted_tokens(head: Any, document: Document, num_speculative_tokens: int) -> torch.Tensor:
    """Return the greedy drafts after each known token except the first, [T - 1, K], as token ids of the target.

    Row t has the drafts for the tokens t+2, t+3, ... of the document, made when the tokens up to t+1 are known. Rows
    outside the response contain -1.
    """
    num_tokens, k = len(document.token_ids_T), num_speculative_tokens
    anchor, depth, states = _draft_states(head, document, k)
    drafted = torch.full((num_tokens - 1 + k, k), -1)
    if getattr(head, "markov_head", None) is None:
        drafted[anchor, depth] = most_likely_drafts(head, states).cpu()
        return drafted[: num_tokens - 1]
    previous_ids = F.pad(document.token_ids_T[1:], (0, k))
    for d in range(k):
        rows = torch.nonzero(depth == d).flatten()
        drafted[anchor[rows], d] = most_likely_drafts(head, states[rows], previous_ids[anchor[rows]]).cpu()
        previous_ids = drafted[:, d]
    return drafted[: num_tokens - 1]


def _draft_states(head: Any, document: Document, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return anchor [R], depth [R] and state [R, H] of each draft of a document's response."""
    # Chains end with the document. The last token is repeated, so that the last rows also draft K tokens.
    padded = Document(
        token_ids_T=torch.cat([document.token_ids_T, document.token_ids_T[-1:].expand(k)]),
        loss_mask_T=torch.cat([document.loss_mask_T, document.loss_mask_T[-1:].expand(k)]),
        aux_TAH=torch.cat([document.aux_TAH, document.aux_TAH[-1:].expand(k, -1)]),
        last_TH=torch.cat([document.last_TH, document.last_TH[-1:].expand(k, -1)]),
    )
    loss_mask_T = padded.loss_mask_T[1:]
    if is_block_head(head):
        rows = sample_blocks(loss_mask_T, num_depths=k, share=1.0)
    else:
        rows = sample_rows(loss_mask_T, num_depths=k, ratio=1.0)
    batch = make_batch([padded], [rows])
    device = head.fc.weight.device
    states = head_states(head, batch.to(device), free_run=True)[: batch.num_loss_rows]
    row_R = batch.row_R[: batch.num_loss_rows]
    return batch.anchor_S[row_R], batch.depth_S[row_R], states


def count_accepted(token_ids: Sequence[int], drafted: torch.Tensor, start: int) -> list[int]:
    """Return the number of accepted draft tokens in each verification step of a response.

    Prefill emits the response's first token, at index `start`.

    Example: the response is 5 6 7 8, every draft is correct, and K=2. The first step drafts 6 7 after 5, accepts both
    and emits 8, so the result is [2].
    """
    accepted = []
    last_known = start
    while last_known < len(token_ids) - 1:
        num_accepted = 0
        for draft, token in zip(drafted[last_known - 1].tolist(), token_ids[last_known + 1 :], strict=False):
            if draft != token:
                break
            num_accepted += 1
        accepted.append(num_accepted)
        last_known += num_accepted + 1
    return accepted


def estimate_acceptance(
    head: Any, store: Features, documents: Sequence[int], *, num_speculative_tokens: int
) -> SpeculationStats:
    histogram = [0] * (num_speculative_tokens + 1)
    for index in documents:
        (document,) = store.documents([index])
        start = int(document.loss_mask_T.int().argmax())  # the response's first token
        drafted = drafted_tokens(head, document, num_speculative_tokens)
        for accepted in count_accepted(document.token_ids_T.tolist(), drafted, start):
            histogram[accepted] += 1
    return SpeculationStats.from_histogram(histogram, sum(histogram) * num_speculative_tokens)
