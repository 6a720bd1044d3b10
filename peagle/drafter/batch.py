"""COD sampling and training batches.

P-EAGLE (arXiv 2602.01469) drafts K tokens in one pass. The input row at depth 0 has the last known token and the
target's state; the row at depth d, d tokens later, has a mask token and a learned state. Together, these rows are a
chain, and the position of the last known token is its anchor. Conditional-on-distribution (COD) sampling keeps all
positions at depth 0, and a share of `ratio ** d` of them at depth d.

A block head (DFlash, DSpark) also has a row for each anchor and depth. But its rows have no target states. They read
the states from keys and values, and attend to all rows of their block, so the block of an anchor is never incomplete.

From the state at token t and the embedding of token t+1, the head predicts the target's distribution after t+1, t+2,
... An engine knows this state and this token when it drafts. Documents are shifted accordingly and packed.

Shapes: T tokens (of one document, or of all documents after the shift), S rows, R rows with a loss, P positions
with a loss. In a batch, these numbers include padding, which is excluded from the loss.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from peagle.drafter.features import Document


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one document: known tokens (depth 0), then chains ordered by anchor; or blocks ordered by anchor."""

    anchor_S: torch.Tensor  # position of the last known token of the row's chain
    depth_S: torch.Tensor  # number of tokens after the anchor
    first_anchor: int = 0  # rows with earlier anchors only provide context, and have no loss (`training.py`)
    is_blocks: bool = False  # whether the rows are those of a block head, with all depths of each anchor

    @property
    def position(self) -> torch.Tensor:
        """The position with the target distribution that the row predicts."""
        return self.anchor_S + self.depth_S

    def __len__(self) -> int:
        return len(self.anchor_S)

    @property
    def num_known(self) -> int:
        return 0 if self.is_blocks else int((self.depth_S == 0).sum())

    @property
    def block_anchors(self) -> torch.Tensor:
        """The anchor of each block."""
        return self.anchor_S[self.depth_S == 0]

    def to(self, device: torch.device | str) -> "Rows":
        anchor, depth = (tensor.to(device, non_blocking=True) for tensor in (self.anchor_S, self.depth_S))
        return replace(self, anchor_S=anchor, depth_S=depth)

    def select(self, index: torch.Tensor) -> "Rows":
        return Rows(self.anchor_S[index], self.depth_S[index])


def sample_rows(
    loss_mask_T: torch.Tensor, *, num_depths: int, ratio: float, generator: torch.Generator | None = None
) -> Rows:
    """Sample the rows of one document.

    Depth 0 keeps every token, since later rows attend to it. A chain starts at a token with a loss, and ends before the
    first token without one. An anchor that is kept at depth d is kept at all smaller depths too, because a row attends
    to the smaller depths of its own chain.

    Example: T=5, loss on the positions 2, 3, 4, ratio 1, three depths:
        depth 0: anchors 0 1 2 3 4; then the chain of anchor 2 (rows at positions 3 and 4) and of anchor 3 (row at 4).

    Args:
        num_depths: K_train, including depth 0.
        ratio: fraction of the anchors that is kept from one depth to the next.
    """
    num_tokens = loss_mask_T.shape[0]
    anchors = torch.nonzero(loss_mask_T.cpu()).flatten()
    rank = torch.empty_like(anchors)
    rank[torch.randperm(len(anchors), generator=generator)] = torch.arange(len(anchors))
    depth_D = torch.arange(1, num_depths)
    num_kept_D = torch.tensor([round(len(anchors) * ratio**depth) for depth in range(1, num_depths)], dtype=torch.long)
    has_loss = F.pad(loss_mask_T.cpu(), (0, num_depths))[anchors[:, None] + depth_D]
    kept_anchor, kept_depth = torch.nonzero((rank[:, None] < num_kept_D) & has_loss, as_tuple=True)
    return Rows(
        torch.cat([torch.arange(num_tokens), anchors[kept_anchor]]),
        torch.cat([torch.zeros(num_tokens, dtype=torch.long), depth_D[kept_depth]]),
    )


def sample_blocks(
    loss_mask_T: torch.Tensor, *, num_depths: int, share: float, generator: torch.Generator | None = None
) -> Rows:
    """Sample the rows of one document for a block head: all depths of a share of the anchors, and at least one anchor.

    Rows after the end of the response are inputs of their block, but have no loss.
    """
    positions = torch.nonzero(loss_mask_T.cpu()).flatten()
    num_kept = max(1, round(len(positions) * share))
    anchors = positions[torch.randperm(len(positions), generator=generator)[:num_kept]].sort().values
    return Rows(anchors.repeat_interleave(num_depths), torch.arange(num_depths).repeat(len(anchors)), is_blocks=True)


def attention_mask(query: Rows, key: Rows) -> torch.Tensor:
    """Return [..., Q, K] bool. Rows attend to known tokens up to their anchor, and to earlier rows of their chain."""
    query_anchor, key_anchor = query.anchor_S[..., :, None], key.anchor_S[..., None, :]
    query_depth, key_depth = query.depth_S[..., :, None], key.depth_S[..., None, :]
    is_known = (key_depth == 0) & (key_anchor <= query_anchor)
    is_own_chain = (key_anchor == query_anchor) & (key_depth <= query_depth)
    return is_known | is_own_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The inputs of one forward pass of the head."""

    token_ids_T: torch.Tensor  # the known token at each position (x[t+1] of its document)
    document_position_T: torch.Tensor  # the position within the document, for the rotary embedding
    aux_TAH: torch.Tensor  # the target's aux states (at t)
    last_PH: torch.Tensor  # the target's states before its final norm, at positions with a loss (at t+1)
    anchor_S: torch.Tensor  # index in T of the row's anchor
    depth_S: torch.Tensor
    row_R: torch.Tensor  # rows with a loss, ordered by position
    position_R: torch.Tensor  # index in P of each row in `row_R`
    documents: tuple[Rows, ...]  # the rows of each document, on the CPU, with anchors relative to the document
    starts: tuple[int, ...]  # index in T of each document
    num_loss_rows: int
    num_tokens: int

    @property
    def row_position(self) -> torch.Tensor:
        """The row's position within its document."""
        return self.document_position_T[self.anchor_S] + self.depth_S

    def to(self, device: torch.device | str) -> "TrainingBatch":
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def make_batch(documents: Sequence[Document], rows: Sequence[Rows]) -> TrainingBatch:
    """Pack documents with rows that were sampled from their loss masks after the shift."""
    token_ids = torch.cat([document.token_ids_T[1:] for document in documents])
    loss_mask = torch.cat([document.loss_mask_T[1:] for document in documents])
    lengths = [len(document.token_ids_T) - 1 for document in documents]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    anchor = torch.cat([r.anchor_S + start for r, start in zip(rows, starts[:-1], strict=True)])
    depth = torch.cat([r.depth_S for r in rows])
    position = anchor + depth
    is_scored = torch.cat(
        [(r.anchor_S >= r.first_anchor) & (r.position < length) for r, length in zip(rows, lengths, strict=True)]
    )
    row = torch.nonzero(loss_mask[position.clamp(max=len(loss_mask) - 1)] & is_scored).flatten()
    row = row[position[row].argsort(stable=True)]
    return TrainingBatch(
        token_ids_T=_pad(token_ids),
        document_position_T=_pad(torch.cat([torch.arange(length) for length in lengths])),
        aux_TAH=_pad(torch.cat([document.aux_TAH[:-1] for document in documents])),
        last_PH=_pad(torch.cat([document.last_TH[1:] for document in documents])[loss_mask]),
        anchor_S=_pad(anchor),
        depth_S=_pad(depth),
        row_R=_pad(row),
        position_R=_pad((loss_mask.cumsum(0) - 1)[position[row]]),
        documents=tuple(rows),
        starts=tuple(starts[:-1].tolist()),
        num_loss_rows=len(row),
        num_tokens=sum(len(document.token_ids_T) for document in documents),
    )


def _pad(tensor: torch.Tensor) -> torch.Tensor:
    """Append at most len/8 or 7 zeros, whichever is more, so that few distinct lengths occur."""
    step = max(8, 2 ** (len(tensor).bit_length() - 4))
    missing = -len(tensor) % step
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
