"""Attention of packed documents in blocks, so that little is computed or kept that a mask would throw away.

Rows of a document are its known tokens (depth 0) and, behind them, its chains anchor by anchor (cod.py). Known tokens
attend causally among themselves. A block of chain rows attends to the known tokens up to its last anchor and to itself:
chains never see each other, so one square mask over all rows of a document would be mostly empty.

Registered with transformers under a name of its own, so that the head's layers stay the library's.

Shapes: Q rows of a block that ask, K rows that answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from peagle.drafter.cod import Rows, attention_mask

DOCUMENT_ATTENTION = "peagle_documents"
BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that attend together.

    Attributes:
        query: the rows that ask; blocks follow each other.
        keys: the rows that answer, side by side.
        mask: [Q, K] bool, True where the row may attend; None for causal attention of the rows among themselves.
    """

    query: slice
    keys: tuple[slice, ...]
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The blocks of packed documents, in the order of their rows."""

    blocks: tuple[Block, ...]

    def to(self, device: torch.device | str) -> "AttentionPlan":
        """The plan with its masks on another device."""
        return AttentionPlan(
            tuple(
                block if block.mask is None else replace(block, mask=block.mask.to(device, non_blocking=True))
                for block in self.blocks
            )
        )


def parallel_plan(documents: Sequence[Rows]) -> AttentionPlan:
    """Who attends to whom when all depths are computed in one pass (P-EAGLE); rows packed document by document."""
    blocks, first = [], 0
    for rows in documents:
        known = slice(first, first + rows.num_known)
        blocks.append(Block(known, (known,)))
        for start, stop in _chain_blocks(rows, range(rows.num_known, len(rows))):
            asked = torch.cat([torch.arange(int(rows.anchor_S[stop - 1]) + 1), torch.arange(start, stop)])
            mask = attention_mask(rows.select(torch.arange(start, stop)), rows.select(asked))
            own = slice(first + start, first + stop)
            blocks.append(Block(own, (slice(first, first + len(asked) - (stop - start)), own), mask))
        first += len(rows)
    return AttentionPlan(tuple(blocks))


def sequential_plan(documents: Sequence[Rows], depth: int) -> AttentionPlan:
    """Who attends to whom when only the rows at `depth` are computed (EAGLE-3).

    Keys are those of a cache that holds depth after depth, and within each the documents side by side.
    """
    counts = torch.tensor([[int((rows.depth_S == d).sum()) for rows in documents] for d in range(depth + 1)])
    # Where the rows of each depth and document begin in the cache.
    begins = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    blocks = []
    for index, rows in enumerate(documents):
        first = int(begins[depth, index] - begins[depth, 0])
        if depth == 0:
            known = slice(first, first + rows.num_known)
            blocks.append(Block(known, (known,)))
            continue
        anchors = [rows.anchor_S[rows.depth_S == d] for d in range(depth + 1)]
        for start in range(0, len(anchors[depth]), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(anchors[depth]))
            blocks.append(_sequential_block(anchors, begins[:, index].tolist(), first, start, stop))
    return AttentionPlan(tuple(blocks))


def _sequential_block(anchors: list[torch.Tensor], begins: list[int], first: int, start: int, stop: int) -> Block:
    """The block of the rows `start` to `stop` at the last depth of `anchors`."""
    depth = len(anchors) - 1
    asking = anchors[depth][start:stop]
    low, high = int(asking[0]), int(asking[-1])
    keys, key_rows = [], []
    for d, known in enumerate(anchors):
        begin = 0 if d == 0 else int(torch.searchsorted(known, low))
        end = int(torch.searchsorted(known, high, right=True))
        keys.append(slice(begins[d] + begin, begins[d] + end))
        key_rows.append(Rows(known[begin:end], torch.full((end - begin,), d)))
    answering = Rows(torch.cat([rows.anchor_S for rows in key_rows]), torch.cat([rows.depth_S for rows in key_rows]))
    mask = attention_mask(Rows(asking, torch.full_like(asking, depth)), answering)
    return Block(slice(first + start, first + stop), tuple(keys), mask)


def _chain_blocks(rows: Rows, chain: range) -> Iterator[tuple[int, int]]:
    """Cut chain rows into blocks of about BLOCK_ROWS, never through the chain of one anchor."""
    anchors = rows.anchor_S.tolist()
    start = chain.start
    for row in range(chain.start + 1, chain.stop + 1):
        if row == chain.stop or (row - start >= BLOCK_ROWS and anchors[row] != anchors[row - 1]):
            yield start, row
            start = row


def document_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionPlan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention block by block.

    Args:
        module: the layer; not read.
        query: [1, heads, rows, head_dim].
        key: [1, KV heads, keys, head_dim].
        value: like `key`.
        attention_mask: the blocks.
        scaling: of the scores.

    Rows behind the last block are padding; nothing attends to them and they get zeros.

    Returns:
        [1, rows, heads, head_dim], and no weights.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = [
        F.scaled_dot_product_attention(
            query[:, :, block.query],
            torch.cat([key[:, :, keys] for keys in block.keys], dim=2),
            torch.cat([value[:, :, keys] for keys in block.keys], dim=2),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
        )
        for block in attention_mask.blocks
    ]
    end = attention_mask.blocks[-1].query.stop
    outputs.append(torch.zeros_like(query[:, :, end:]))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
