"""Attention of packed documents, each within itself: the mask is per document, so nothing is spent across them.

Registered with transformers under a name of its own, so that the head's layers stay the library's.

Shapes: Q rows of one document that ask, K rows of it that answer.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

DOCUMENT_ATTENTION = "peagle_documents"


@dataclass(frozen=True, slots=True)
class DocumentMasks:
    """For packed documents in their order: who may attend to whom within each.

    Attributes:
        masks: [Q, K] bool for each document; its Q rows follow those of the document before it.
        keys: for each document the indices [K] of its keys; None when the rows that ask are the keys.
    """

    masks: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...] | None = None

    def to(self, device: torch.device | str) -> "DocumentMasks":
        """The masks on another device."""

        def moved(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)

        return DocumentMasks(moved(self.masks), None if self.keys is None else moved(self.keys))


def document_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DocumentMasks,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each document's rows to its own keys.

    Args:
        module: the layer; not read.
        query: [1, heads, rows, head_dim].
        key: [1, KV heads, keys, head_dim].
        value: like `key`.
        attention_mask: the documents.
        scaling: of the scores.

    Rows behind the last document are padding; nothing attends to them and they get zeros.

    Returns:
        [1, rows, heads, head_dim], and no weights.
    """
    groups = query.shape[1] // key.shape[1]
    outputs, start = [], 0
    for index, mask in enumerate(attention_mask.masks):
        rows = slice(start, start + len(mask))
        start += len(mask)
        keys = rows if attention_mask.keys is None else attention_mask.keys[index]
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, rows],
                key[:, :, keys].repeat_interleave(groups, dim=1),
                value[:, :, keys].repeat_interleave(groups, dim=1),
                attn_mask=mask,
                scale=scaling,
            )
        )
    outputs.append(torch.zeros_like(query[:, :, start:]))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
