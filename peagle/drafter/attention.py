"""Block attention over packed documents, without the work that a mask would discard.

The rows of a document are its known tokens (depth 0), followed by the chains (deeper rows, `batch.py`), ordered by
anchor. Known tokens attend causally to each other. A block of chain rows attends to the known tokens up to its last
anchor, and to itself. Chains never attend to each other, so a single square mask over all rows of a document would be
mostly empty.

Gathered keys, masks and scores are not saved for the gradient: backward computes each block again, so memory grows
linearly with the number of rows. On a GPU, starting a kernel takes as long as computing several blocks, so the blocks
of a training step are padded and computed together if all their scores fit into memory (`_MAX_PADDED_SCORES`).

Shapes: N blocks, Q query rows of a block, K key rows of a block, S rows.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from peagle.drafter.batch import Rows, attention_mask

DOCUMENT_ATTENTION = "peagle_documents"
MIN_BLOCK_ROWS = 128  # minimum rows of a block; larger blocks compute more scores that are masked
_TOKENS_PER_BLOCK_ROW = 16  # long documents have larger blocks, because each block gathers the known tokens again
_MAX_PADDED_SCORES = 2**27  # per training step and attention head: 128 MiB of mask

_PAD_MULTIPLE = 8  # padded lengths are multiples of this, which GPU kernels require for masks
# Excludes cuDNN: its gradients were not finite for the masks of an EAGLE-3 head (H200, torch 2.11.0, 2026-11-26).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_LAST_ANCHOR = int(torch.iinfo(torch.long).max)  # anchor of padding queries, so they attend to all known tokens


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows that are computed together, and the key rows that they attend to."""

    query: slice
    keys: tuple[slice, ...]
    query_rows: Rows | None = None  # anchors and depths of `query`; None means causal attention within the block
    key_rows: Rows | None = None

    def mask(self) -> torch.Tensor | None:
        """Return [Q, K] bool, True where a query row attends to a key row; None means causal attention."""
        if self.query_rows is None or self.key_rows is None:
            return None
        return attention_mask(self.query_rows, self.key_rows)

    def to(self, device: torch.device | str) -> "Block":
        if self.query_rows is None or self.key_rows is None:
            return self
        return replace(self, query_rows=self.query_rows.to(device), key_rows=self.key_rows.to(device))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The blocks of packed documents, in row order."""

    blocks: tuple[Block, ...]

    def to(self, device: torch.device | str) -> "DocumentPlan":
        if torch.device(device).type != "cpu" and self.num_padded_scores <= _MAX_PADDED_SCORES:
            return self.padded(device)
        return AttentionPlan(tuple(block.to(device) for block in self.blocks))

    @property
    def num_padded_scores(self) -> int:
        """Scores per attention head if the blocks are padded."""
        num_scores = 0
        for group in self._groups():
            num_queries = max(_length(block.query) for block in group)
            num_scores += len(group) * num_queries * max(sum(map(_length, block.keys)) for block in group)
        return num_scores

    def padded(self, device: torch.device | str = "cpu") -> "PaddedPlan":
        return PaddedPlan(tuple(PaddedBlocks.of(group, device) for group in self._groups()))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        output: torch.Tensor = _BlockAttention.apply(query, key, value, self, scaling)  # type: ignore[no-untyped-call]
        return output

    def _groups(self) -> list[list[Block]]:
        """Split the blocks into causal and masked ones; each group is padded together."""
        causal = [block for block in self.blocks if block.query_rows is None]
        masked = [block for block in self.blocks if block.query_rows is not None]
        return [group for group in (causal, masked) if group]


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """Blocks padded to the length of the longest."""

    query_NQ: torch.Tensor  # indices of the query rows; 0 for padding
    key_NK: torch.Tensor  # indices of the key rows; 0 for padding
    unpadded_S: torch.Tensor  # indices of the rows that are not padding, in the flattened [N * Q]
    # Bool, shared by all layers; None means causal attention. No row attends to padding. Padding rows attend to
    # all known tokens, and their output is dropped.
    mask_NQK: torch.Tensor | None

    @classmethod
    def of(cls, blocks: Sequence[Block], device: torch.device | str) -> "PaddedBlocks":
        query_indices = [torch.arange(block.query.start, block.query.stop) for block in blocks]
        key_indices = [torch.cat([torch.arange(keys.start, keys.stop) for keys in block.keys]) for block in blocks]
        query_NQ = _pad(query_indices)
        lengths_N = torch.tensor([len(indices) for indices in query_indices])
        unpadded_S = torch.nonzero((torch.arange(query_NQ.shape[1]) < lengths_N[:, None]).flatten()).flatten()
        query_rows = [block.query_rows for block in blocks if block.query_rows is not None]
        key_rows = [block.key_rows for block in blocks if block.key_rows is not None]
        mask_NQK = None
        if query_rows:
            mask_NQK = attention_mask(
                _pad_rows(query_rows, anchor=_LAST_ANCHOR, depth=0).to(device),
                _pad_rows(key_rows, anchor=-1, depth=1).to(device),
            )
        return cls(query_NQ.to(device), _pad(key_indices).to(device), unpadded_S.to(device), mask_NQK)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of the query rows, [S], and their attention, [1, heads, S, head_dim]."""
        # Gather in float32, because the gradient of the first keys is a sum over all blocks.
        sum_dtype = torch.promote_types(key.dtype, torch.float32)
        query_key_value = [_gather(query, self.query_NQ)]
        query_key_value += [_gather(tensor.to(sum_dtype), self.key_NK).to(tensor.dtype) for tensor in (key, value)]
        output = _attend(query_key_value, None if self.mask_NQK is None else self.mask_NQK[:, None], scaling)
        flat = output.transpose(0, 1).flatten(1, 2)[None]
        return self.query_NQ.flatten()[self.unpadded_S], flat[:, :, self.unpadded_S]


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """The padded blocks of packed documents. Gradients come from autograd."""

    groups: tuple[PaddedBlocks, ...]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        output = torch.zeros_like(query)
        for group in self.groups:
            rows, attended = group.attend(query, key, value, scaling)
            output = output.index_copy(2, rows, attended)
        return output


DocumentPlan = AttentionPlan | PaddedPlan


def parallel_attention_plan(documents: Sequence[Rows]) -> AttentionPlan:
    """Plan the attention of a P-EAGLE head: one pass over all depths. Rows are packed document by document."""
    blocks, first_row = [], 0
    for rows in documents:
        known = slice(first_row, first_row + rows.num_known)
        blocks.append(Block(known, (known,)))
        for start, stop in _chain_blocks(rows, range(rows.num_known, len(rows))):
            key_index = torch.cat([torch.arange(int(rows.anchor_S[stop - 1]) + 1), torch.arange(start, stop)])
            chain_rows = slice(first_row + start, first_row + stop)
            keys = (slice(first_row, first_row + len(key_index) - (stop - start)), chain_rows)
            blocks.append(Block(chain_rows, keys, rows.select(torch.arange(start, stop)), rows.select(key_index)))
        first_row += len(rows)
    return AttentionPlan(tuple(blocks))


def sequential_attention_plan(documents: Sequence[Rows], depth: int) -> AttentionPlan:
    """Plan the attention of an EAGLE-3 head: one pass over the rows at `depth`.

    Keys are in a cache that is ordered by depth and, within each depth, by document.
    """
    counts = torch.tensor([[int((rows.depth_S == d).sum()) for rows in documents] for d in range(depth + 1)])
    # Start of each depth and document in the cache.
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    blocks = []
    for index, rows in enumerate(documents):
        first_row = int(starts[depth, index] - starts[depth, 0])
        if depth == 0:
            known = slice(first_row, first_row + rows.num_known)
            blocks.append(Block(known, (known,)))
            continue
        anchors = [rows.anchor_S[rows.depth_S == d] for d in range(depth + 1)]
        num_block_rows = _block_rows(rows.num_known)
        for start in range(0, len(anchors[depth]), num_block_rows):
            stop = min(start + num_block_rows, len(anchors[depth]))
            blocks.append(_sequential_block(anchors, starts[:, index].tolist(), first_row, start, stop))
    return AttentionPlan(tuple(blocks))


def block_attention_plan(
    documents: Sequence[Rows], starts: Sequence[int], *, num_context: int, block_size: int
) -> AttentionPlan:
    """Plan the attention of a DFlash or DSpark head. A row attends to the context up to its anchor and to its block.

    Args:
        documents: the rows of each document; only their anchors matter.
        starts: index of each document's first key in the context.
        num_context: number of keys of the context. The keys of the blocks follow, ordered like the query rows.
        block_size: query rows of each block.
    """
    blocks, first_row = [], 0
    for rows, start in zip(documents, starts, strict=True):
        anchors = rows.block_anchors
        for group in torch.split(anchors, max(1, _block_rows(int(anchors[-1])) // block_size)):
            context = torch.arange(int(group[-1]) + 1)
            anchor = group.repeat_interleave(block_size)
            num_rows = len(anchor)
            query_rows = Rows(anchor, torch.ones_like(anchor))  # at equal depth, rows of an anchor attend to each other
            key_rows = Rows(torch.cat([context, anchor]), torch.cat([torch.zeros_like(context), query_rows.depth_S]))
            keys = (
                slice(start, start + len(context)),
                slice(num_context + first_row, num_context + first_row + num_rows),
            )
            blocks.append(Block(slice(first_row, first_row + num_rows), keys, query_rows, key_rows))
            first_row += num_rows
    return AttentionPlan(tuple(blocks))


def _sequential_block(anchors: list[torch.Tensor], starts: list[int], first_row: int, start: int, stop: int) -> Block:
    """Return the block of rows `start` to `stop` at the last depth. `anchors` and `starts` (of keys) are by depth."""
    depth = len(anchors) - 1
    query_anchors = anchors[depth][start:stop]
    low, high = int(query_anchors[0]), int(query_anchors[-1])
    keys, key_rows = [], []
    for d, key_anchors in enumerate(anchors):
        begin = 0 if d == 0 else int(torch.searchsorted(key_anchors, low))
        end = int(torch.searchsorted(key_anchors, high, right=True))
        keys.append(slice(starts[d] + begin, starts[d] + end))
        key_rows.append(Rows(key_anchors[begin:end], torch.full((end - begin,), d)))
    return Block(
        slice(first_row + start, first_row + stop),
        tuple(keys),
        Rows(query_anchors, torch.full_like(query_anchors, depth)),
        Rows(torch.cat([rows.anchor_S for rows in key_rows]), torch.cat([rows.depth_S for rows in key_rows])),
    )


def _block_rows(num_known: int) -> int:
    return max(MIN_BLOCK_ROWS, num_known // _TOKENS_PER_BLOCK_ROW)


def _chain_blocks(rows: Rows, chain_rows: range) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of blocks of about equal length, without splitting the rows of an anchor."""
    anchors, block_rows = rows.anchor_S.tolist(), _block_rows(rows.num_known)
    start = chain_rows.start
    for row in range(chain_rows.start + 1, chain_rows.stop + 1):
        if row == chain_rows.stop or (row - start >= block_rows and anchors[row] != anchors[row - 1]):
            yield start, row
            start = row


def document_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DocumentPlan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers that returns no attention weights. `attention_mask` is the plan.

    Args:
        query: [1, heads, rows, head_dim]. Rows after the last block are padding and get zeros.
        key: [1, KV heads, keys, head_dim].
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return attention_mask.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: AttentionPlan,
        scaling: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.scaling = plan, scaling
        output = torch.zeros_like(query)
        for block in plan.blocks:
            output[:, :, block.query] = _attend(_query_key_value(block, query, key, value), block.mask(), scaling)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        # Sums are in float32: every block adds to the gradient of the first keys, and bf16 would round small terms off.
        sum_dtype = torch.promote_types(key.dtype, torch.float32)
        # torch's CPU kernel for this gradient is slower in bf16, especially if every block has a different shape.
        dtype = sum_dtype if query.device.type == "cpu" else query.dtype
        grad_key, grad_value = torch.zeros_like(key, dtype=sum_dtype), torch.zeros_like(value, dtype=sum_dtype)
        for block in ctx.plan.blocks:
            block_tensors = _query_key_value(block, query, key, value)
            query_key_value = [tensor.detach().to(dtype).requires_grad_() for tensor in block_tensors]
            with torch.enable_grad():
                output = _attend(query_key_value, block.mask(), ctx.scaling)
            block_grad = grad_output[:, :, block.query].to(dtype)
            grad_query[:, :, block.query], block_grad_key, block_grad_value = torch.autograd.grad(
                output, query_key_value, block_grad
            )
            start = 0
            for keys in block.keys:
                stop = start + _length(keys)
                grad_key[:, :, keys] += block_grad_key[:, :, start:stop]
                grad_value[:, :, keys] += block_grad_value[:, :, start:stop]
                start = stop
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _query_key_value(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    return [
        query[:, :, block.query],
        *(torch.cat([tensor[:, :, keys] for keys in block.keys], dim=2) for tensor in (key, value)),
    ]


def _attend(query_key_value: Sequence[torch.Tensor], mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    query, key, value = query_key_value
    heads_per_kv_head = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_kv_head, dim=1) for tensor in (key, value))
    with sdpa_kernel(_KERNELS):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def _length(rows: slice) -> int:
    return int(rows.stop) - int(rows.start)


def _pad(rows: Sequence[torch.Tensor], filler: int = 0) -> torch.Tensor:
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=filler)
    return F.pad(padded, (0, -padded.shape[1] % _PAD_MULTIPLE), value=filler)


def _pad_rows(rows: Sequence[Rows], *, anchor: int, depth: int) -> Rows:
    return Rows(_pad([block.anchor_S for block in rows], anchor), _pad([block.depth_S for block in rows], depth))


def _gather(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows [N, heads, rows, head_dim] of [1, heads, all rows, head_dim]."""
    gathered = tensor[0].index_select(1, index.flatten())
    return gathered.view(len(gathered), *index.shape, -1).transpose(0, 1)


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
