"""Several documents as one training batch: shifted, sampled by COD and packed row after row.

The head reads the state at token t beside the embedding of token t+1 (that is what an engine has when it drafts) and
predicts the target's distribution after t+1, t+2, ... Documents are packed, not padded; each attends to itself alone.

Row counts are rounded up, so that a CPU's matrix kernels, which are built for each shape, can be used again at the
next step. What is added belongs to no document and bears no loss.

Shapes: T tokens of all documents after the shift, S rows, R rows under the loss, P positions under the loss, each
with its padding.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from peagle.drafter.cod import Rows
from peagle.drafter.store import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one forward pass of the head needs.

    Attributes:
        token_ids_T: the known token at each position (x[t+1] of its document).
        aux_TAH: the target's aux states beside it (at t).
        last_PH: the target's states entering its final norm, at the positions under the loss (at t+1).
        anchor_S: index of the row's anchor in T.
        depth_S: the row's depth.
        place_S: the row's position within its document, for the rotary embedding.
        row_R: rows under the loss, ordered by the position they predict from.
        target_R: for each of them the index in P.
        documents: the rows of each document, on the CPU; their anchors count from the document's own first token.
        num_loss_rows: rows of R that are not padding.
        num_tokens: tokens of the documents before the shift.
    """

    token_ids_T: torch.Tensor
    aux_TAH: torch.Tensor
    last_PH: torch.Tensor
    anchor_S: torch.Tensor
    depth_S: torch.Tensor
    place_S: torch.Tensor
    row_R: torch.Tensor
    target_R: torch.Tensor
    documents: tuple[Rows, ...]
    num_loss_rows: int
    num_tokens: int

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on another device."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def make_batch(documents: Sequence[Document], rows: Sequence[Rows]) -> Batch:
    """Pack documents.

    Args:
        documents: at least one, each of two tokens or more.
        rows: those of each document, sampled from its loss mask after the shift.
    """
    token_ids = torch.cat([document.token_ids_T[1:] for document in documents])
    loss_mask = torch.cat([document.loss_mask_T[1:] for document in documents])
    starts = torch.tensor([0, *(len(document.token_ids_T) - 1 for document in documents)]).cumsum(0)
    anchor = torch.cat([own.anchor_S + start for own, start in zip(rows, starts[:-1], strict=True)])
    depth = torch.cat([own.depth_S for own in rows])
    position = anchor + depth
    counts = torch.cat([own.anchor_S >= own.first_anchor for own in rows])
    row = torch.nonzero(loss_mask[position] & counts).flatten()
    row = row[position[row].argsort(stable=True)]
    return Batch(
        token_ids_T=_pad(token_ids),
        aux_TAH=_pad(torch.cat([document.aux_TAH[:-1] for document in documents])),
        last_PH=_pad(torch.cat([document.last_TH[1:] for document in documents])[loss_mask]),
        anchor_S=_pad(anchor),
        depth_S=_pad(depth),
        place_S=_pad(torch.cat([own.position for own in rows])),
        row_R=_pad(row),
        target_R=_pad((loss_mask.cumsum(0) - 1)[position[row]]),
        documents=tuple(rows),
        num_loss_rows=len(row),
        num_tokens=sum(len(document.token_ids_T) for document in documents),
    )


def _pad(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros behind the last row, so that few lengths occur: at most an eighth is added, or 7 rows."""
    step = max(8, 2 ** (len(tensor).bit_length() - 4))
    missing = -len(tensor) % step
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
