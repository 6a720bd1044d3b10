"""Blocks of attention side by side, in a few large kernels, as a GPU wants them.

A GPU starts a kernel in the time in which it could compute several blocks of packed documents (attention.py). Here all
blocks of a step, each padded to the longest, attend at once. Gradients are autograd's.

Shapes: N blocks, Q rows of a block that ask, K rows that answer, S rows.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peagle.drafter.batch import Rows, attention_mask

if TYPE_CHECKING:
    from peagle.drafter.attention import Block

_MULTIPLE = 8  # of rows, as GPU kernels want masks
# Without cuDNN's, whose gradients were not finite for the masks of an EAGLE-3 head (H200, torch 2.11.0, 2026-11-26).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_LAST = int(torch.iinfo(torch.long).max)  # an anchor behind all others


def attend(parts: Sequence[torch.Tensor], mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    """Attention of query, key and value.

    Each is [N, heads, rows, head_dim]; KV heads may be fewer.

    Args:
        parts: the three.
        mask: True where the row may attend; None for causal attention.
        scaling: of the scores.
    """
    query, key, value = parts
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with sdpa_kernel(_KERNELS):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """Blocks side by side, each as long as the longest.

    Attributes:
        query_NQ: index of the row that asks; 0 for padding.
        key_NK: index of the row that answers; 0 for padding.
        place_S: where in N * Q the rows are that are no padding.
        mask_NQK: bool, the same for all layers. Nobody attends to padding, which may attend to all known tokens. None
            for causal attention.
    """

    query_NQ: torch.Tensor
    key_NK: torch.Tensor
    place_S: torch.Tensor
    mask_NQK: torch.Tensor | None

    @classmethod
    def of(cls, blocks: "Sequence[Block]", device: torch.device | str) -> "PaddedBlocks":
        """The blocks, which are all causal or all not, on a device."""
        query = [torch.arange(block.query.start, block.query.stop) for block in blocks]
        key = [torch.cat([torch.arange(keys.start, keys.stop) for keys in block.keys]) for block in blocks]
        query_NQ = _padded(query)
        lengths_N = torch.tensor([len(rows) for rows in query])
        place_S = torch.nonzero((torch.arange(query_NQ.shape[1]) < lengths_N[:, None]).flatten()).flatten()
        asking = [block.asking for block in blocks if block.asking is not None]
        answering = [block.answering for block in blocks if block.answering is not None]
        mask_NQK = None
        if asking:
            mask_NQK = attention_mask(
                _side_by_side(asking, anchor=_LAST, depth=0).to(device),
                _side_by_side(answering, anchor=-1, depth=1).to(device),
            )
        return cls(query_NQ.to(device), _padded(key).to(device), place_S.to(device), mask_NQK)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of the rows that ask, and what they get.

        Returns:
            [S], and [1, heads, S, head_dim].
        """
        wide = torch.promote_types(key.dtype, torch.float32)  # the first keys' gradient is a sum over all blocks
        parts = [_gathered(query, self.query_NQ)]
        parts += [_gathered(tensor.to(wide), self.key_NK).to(tensor.dtype) for tensor in (key, value)]
        output = attend(parts, None if self.mask_NQK is None else self.mask_NQK[:, None], scaling)
        flat = output.transpose(0, 1).flatten(1, 2)[None]
        return self.query_NQ.flatten()[self.place_S], flat[:, :, self.place_S]


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """The blocks of packed documents, padded to be computed side by side."""

    groups: tuple[PaddedBlocks, ...]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention group by group, [1, heads, rows, head_dim]."""
        output = torch.zeros_like(query)
        for group in self.groups:
            rows, attended = group.attend(query, key, value, scaling)
            output = output.index_copy(2, rows, attended)
        return output


def _padded(rows: Sequence[torch.Tensor], filler: int = 0) -> torch.Tensor:
    """[N, longest] with `filler` behind the ends."""
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=filler)
    return F.pad(padded, (0, -padded.shape[1] % _MULTIPLE), value=filler)


def _side_by_side(rows: Sequence[Rows], *, anchor: int, depth: int) -> Rows:
    """[N, longest] anchors and depths, with those given for padding."""
    return Rows(_padded([own.anchor_S for own in rows], anchor), _padded([own.depth_S for own in rows], depth))


def _gathered(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N, heads, rows, head_dim] of [1, heads, ., head_dim]."""
    gathered = tensor[0].index_select(1, index.flatten())
    return gathered.view(len(gathered), *index.shape, -1).transpose(0, 1)
