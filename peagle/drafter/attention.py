"""Block attention of packed documents, without the work that a mask discards.

Rows of a document are its known tokens (depth 0) and, behind them, its chains anchor by anchor (cod.py). Known tokens
attend causally among themselves. A block of chain rows attends to the known tokens up to its last anchor and to itself:
chains never see each other, so one square mask over all rows of a document would be mostly empty.

A block's keys lie apart and have to be put side by side; of a long document that is its length once for every block. So
neither they nor masks nor scores are kept for the gradient: backward computes each block again. Memory then grows with
the number of rows, not with its square.

A GPU starts a kernel in the time in which it could compute several blocks. There the blocks of a step are padded and
attend side by side in a few large kernels, as long as their scores are few enough to keep (`_PADDED_SCORES`).

Registered with transformers under a name of its own, so that the head's layers stay the library's.

Shapes: Q rows of a block that ask, K rows that answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface

from peagle.drafter.batch import Rows, attention_mask
from peagle.drafter.padded_attention import PaddedBlocks, PaddedPlan, attend

DOCUMENT_ATTENTION = "peagle_documents"
BLOCK_ROWS = 128  # at least: the rows of a block answer each other, mostly in vain
_TOKENS_PER_BLOCK_ROW = 16  # and more in a long document, whose tokens are put side by side anew for each block
_PADDED_SCORES = 2**27  # of a step, for each attention head: 128 MiB of mask


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that attend together.

    Attributes:
        query: the rows that ask; blocks follow each other.
        keys: the rows that answer, side by side.
        asking: anchors and depths of `query`; None for causal attention of the rows among themselves.
        answering: those of `keys`.
    """

    query: slice
    keys: tuple[slice, ...]
    asking: Rows | None = None
    answering: Rows | None = None

    def mask(self) -> torch.Tensor | None:
        """[Q, K] bool, True where the row may attend.

        Made when asked for: a mask is larger than its description.
        """
        if self.asking is None or self.answering is None:
            return None
        return attention_mask(self.asking, self.answering)

    def to(self, device: torch.device | str) -> "Block":
        """The block with its rows on another device."""
        if self.asking is None or self.answering is None:
            return self
        return replace(self, asking=self.asking.to(device), answering=self.answering.to(device))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The blocks of packed documents, in the order of their rows."""

    blocks: tuple[Block, ...]

    def to(self, device: torch.device | str) -> "DocumentPlan":
        """The plan on another device, in the form that suits it."""
        if torch.device(device).type != "cpu" and self.num_padded_scores <= _PADDED_SCORES:
            return self.padded(device)
        return AttentionPlan(tuple(block.to(device) for block in self.blocks))

    @property
    def num_padded_scores(self) -> int:
        """Scores of an attention head when the blocks are padded."""
        return sum(
            len(group) * max(map(_num_asking, group)) * max(map(_num_answering, group)) for group in self._groups()
        )

    def padded(self, device: torch.device | str = "cpu") -> "PaddedPlan":
        """The same blocks, to be computed side by side."""
        return PaddedPlan(tuple(PaddedBlocks.of(group, device) for group in self._groups()))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention block by block, [1, heads, rows, head_dim]."""
        output: torch.Tensor = _BlockAttention.apply(query, key, value, self, scaling)  # type: ignore[no-untyped-call]
        return output

    def _groups(self) -> list[list[Block]]:
        """Blocks that are padded together: causal ones, and the others."""
        causal = [block for block in self.blocks if block.asking is None]
        others = [block for block in self.blocks if block.asking is not None]
        return [group for group in (causal, others) if group]


DocumentPlan = AttentionPlan | PaddedPlan


def _num_asking(block: Block) -> int:
    return _length(block.query)


def _num_answering(block: Block) -> int:
    return sum(map(_length, block.keys))


def _length(rows: slice) -> int:
    return int(rows.stop) - int(rows.start)


def parallel_plan(documents: Sequence[Rows]) -> AttentionPlan:
    """Who attends to whom when one pass computes all depths (P-EAGLE).

    Rows are packed document by document.
    """
    blocks, first = [], 0
    for rows in documents:
        known = slice(first, first + rows.num_known)
        blocks.append(Block(known, (known,)))
        for start, stop in _chain_blocks(rows, range(rows.num_known, len(rows))):
            asked = torch.cat([torch.arange(int(rows.anchor_S[stop - 1]) + 1), torch.arange(start, stop)])
            own = slice(first + start, first + stop)
            keys = (slice(first, first + len(asked) - (stop - start)), own)
            blocks.append(Block(own, keys, rows.select(torch.arange(start, stop)), rows.select(asked)))
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
        block_rows = _block_rows(rows.num_known)
        for start in range(0, len(anchors[depth]), block_rows):
            stop = min(start + block_rows, len(anchors[depth]))
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
    return Block(
        slice(first + start, first + stop), tuple(keys), Rows(asking, torch.full_like(asking, depth)), answering
    )


def _block_rows(num_known: int) -> int:
    return max(BLOCK_ROWS, num_known // _TOKENS_PER_BLOCK_ROW)


def _chain_blocks(rows: Rows, chain: range) -> Iterator[tuple[int, int]]:
    """Cut chain rows into blocks of equal length, never through an anchor's chain."""
    anchors, block_rows = rows.anchor_S.tolist(), _block_rows(rows.num_known)
    start = chain.start
    for row in range(chain.start + 1, chain.stop + 1):
        if row == chain.stop or (row - start >= block_rows and anchors[row] != anchors[row - 1]):
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
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return attention_mask.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


class _BlockAttention(torch.autograd.Function):
    """Attention block by block, in forward and again in backward."""

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
            output[:, :, block.query] = _attend(block, _parts(block, query, key, value), scaling)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        # Every block adds to the first keys, and in bf16 the last ones would be lost in the sum.
        wide = torch.promote_types(key.dtype, torch.float32)
        # torch's CPU kernel for this gradient is slower in bf16, most of all where each block has another shape.
        dtype = wide if query.device.type == "cpu" else query.dtype
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for block in ctx.plan.blocks:
            parts = [part.detach().to(dtype).requires_grad_() for part in _parts(block, query, key, value)]
            with torch.enable_grad():
                output = _attend(block, parts, ctx.scaling)
            of_output = grad_output[:, :, block.query].to(dtype)
            of_query, of_keys, of_values = torch.autograd.grad(output, parts, of_output)
            grad_query[:, :, block.query] = of_query
            start = 0
            for keys in block.keys:
                stop = start + keys.stop - keys.start
                grad_key[:, :, keys] += of_keys[:, :, start:stop]
                grad_value[:, :, keys] += of_values[:, :, start:stop]
                start = stop
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _parts(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The block's own query, keys and values, the latter side by side."""
    return [
        query[:, :, block.query],
        *(torch.cat([tensor[:, :, keys] for keys in block.keys], dim=2) for tensor in (key, value)),
    ]


def _attend(block: Block, parts: Sequence[torch.Tensor], scaling: float | None) -> torch.Tensor:
    return attend(parts, block.mask(), scaling)


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
