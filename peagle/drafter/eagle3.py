"""The forward pass of an EAGLE-3 head: one depth after the other, each from the state that the one before it left.

A row at depth d holds the token that stands d behind its anchor's, and the head's own state at depth d - 1 of the same
chain. In training that token is the document's (teacher forcing, as `speculators` trains); in an engine it is the
token that the head drafted.

Shapes: T tokens, S rows, S_d rows at depth d, H hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F

from peagle.drafter.attention import AttentionPlan, sequential_plan
from peagle.drafter.batch import Batch
from peagle.drafter.loss import CHUNK_ROWS


def sequential_states(head: Any, batch: Batch, *, free_run: bool) -> torch.Tensor:
    """All rows' states before the norm, [S, H].

    Args:
        head: an Eagle3DraftModel.
        batch: rows whose chains are nested, as COD samples them.
        free_run: feed the head's own drafts rather than the document's tokens.
    """
    known = head.fc(batch.aux_TAH.to(head.fc.weight.dtype))
    cache = _Cache()
    outputs: list[torch.Tensor] = []
    depth_S = batch.depth_S[: sum(map(len, batch.documents))]  # without the padding
    rows_of_depth = [torch.nonzero(depth_S == depth).flatten() for depth in range(int(depth_S.max()) + 1)]
    state, token_ids = known[batch.anchor_S[rows_of_depth[0]]], batch.token_ids_T[batch.anchor_S[rows_of_depth[0]]]
    for depth, rows in enumerate(rows_of_depth):
        if depth:
            parent = _parents(batch, rows_of_depth[depth - 1], rows)
            state = outputs[-1][parent]
            token_ids = (
                drafted_ids(head, head.norm(state))
                if free_run
                else batch.token_ids_T[batch.anchor_S[rows] + batch.depth_S[rows]]
            )
        plan = sequential_plan(batch.documents, depth).to(state.device)
        outputs.append(_one_depth(head, batch.place_S[rows], state, token_ids, cache, plan))
    order = torch.cat(rows_of_depth).argsort()
    return F.pad(torch.cat(outputs)[order], (0, 0, 0, len(batch.depth_S) - len(order)))


def _one_depth(
    head: Any, place: torch.Tensor, state: torch.Tensor, token_ids: torch.Tensor, cache: "_Cache", plan: AttentionPlan
) -> torch.Tensor:
    row_states = torch.cat([head.embed_tokens(token_ids).to(state.dtype), state], dim=-1)[None]
    places = place[None]
    rotary = head.rotary_emb(row_states, places)
    for layer in head.layers:
        row_states = layer(
            row_states,
            attention_mask=plan,
            position_ids=places,
            position_embeddings=rotary,
            past_key_values=cache,
        )
    return row_states[0]


def _parents(batch: Batch, previous: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each of `rows` the place among `previous` (one depth before) of the row with the same anchor."""
    place = batch.anchor_S.new_full((len(batch.token_ids_T),), -1)
    place[batch.anchor_S[previous]] = torch.arange(len(previous), device=place.device)
    return place[batch.anchor_S[rows]]


def drafted_ids(head: Any, states: torch.Tensor) -> torch.Tensor:
    """The target's id of the likeliest token of each state behind the norm, [S].

    The logits of a long document are gigabytes, so no more than `CHUNK_ROWS` rows of them are held.
    """
    draft_ids = torch.cat([head.lm_head(rows).argmax(-1) for rows in torch.split(states, CHUNK_ROWS)])
    return draft_ids + head.d2t[draft_ids] if head.d2t is not None else draft_ids


class _Cache:
    """Keys and values of the depths so far; what a layer of transformers asks of a cache."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self._kept:
            old_key, old_value = self._kept[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self._kept[layer] = key, value
        return key, value
