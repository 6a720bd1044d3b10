"""Which parallel predictions are trained: COD sampling, and who may attend to whom. Pure functions.

P-EAGLE (arXiv 2602.01469) drafts K tokens in one pass: the row at depth 0 holds the last known token with the
target's state; the row at depth d stands d tokens further on and holds a mask token and a learnt state. Training
every position at every depth would cost K times the sequence; conditional-on-distribution (COD) sampling keeps
all positions at depth 0 and a share ratio**d of them at depth d.

Shapes: T tokens of one document, S rows trained for it.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one document: its known tokens (depth 0), then its chains, anchor by anchor.

    Attributes:
        anchor_S: position of the last known token of the row's chain.
        depth_S: how many tokens further the row stands; its own position is anchor + depth.
        first_anchor: rows of earlier anchors are there to be attended to, and bear no loss (micro.py).
    """

    anchor_S: torch.Tensor
    depth_S: torch.Tensor
    first_anchor: int = 0

    @property
    def position(self) -> torch.Tensor:
        """The position whose target distribution the row predicts."""
        return self.anchor_S + self.depth_S

    def __len__(self) -> int:
        return len(self.anchor_S)

    @property
    def num_known(self) -> int:
        """Rows at depth 0: the document's tokens."""
        return int((self.depth_S == 0).sum())

    def to(self, device: torch.device | str) -> "Rows":
        """The rows on another device."""
        anchor, depth = (tensor.to(device, non_blocking=True) for tensor in (self.anchor_S, self.depth_S))
        return Rows(anchor, depth, self.first_anchor)

    def select(self, index: torch.Tensor) -> "Rows":
        """Some of the rows."""
        return Rows(self.anchor_S[index], self.depth_S[index])


def sample_rows(
    loss_mask_T: torch.Tensor, *, num_depths: int, ratio: float, generator: torch.Generator | None = None
) -> Rows:
    """Sample the rows of one document.

    Depth 0 keeps every token, since later rows attend to it. A chain starts only at a token under the loss and
    ends where the loss does. Chains are nested: an anchor that is kept at depth d is kept at all smaller depths,
    because a row attends to the smaller depths of its own chain.

    Example: T=5, loss on the positions 2, 3, 4, ratio 1, three depths:
        depth 0: anchors 0 1 2 3 4; then the chain of anchor 2 (it predicts from 3 and 4) and that of 3 (from 4).

    Args:
        loss_mask_T: [T] bool.
        num_depths: K_train, depth 0 included.
        ratio: share of the anchors kept from one depth to the next; 1 keeps all.
        generator: of the CPU, for a reproducible draw.
    """
    num_tokens = loss_mask_T.shape[0]
    candidates = torch.nonzero(loss_mask_T.cpu()).flatten()
    rank = torch.empty_like(candidates)
    rank[torch.randperm(len(candidates), generator=generator)] = torch.arange(len(candidates))
    anchors, depths = [], []
    for depth in range(1, num_depths):
        kept = candidates[(rank < round(len(candidates) * ratio**depth)) & (candidates + depth < num_tokens)]
        kept = kept[loss_mask_T.cpu()[kept + depth]]
        anchors.append(kept)
        depths.append(torch.full_like(kept, depth))
    known = Rows(torch.arange(num_tokens), torch.zeros(num_tokens, dtype=torch.long))
    if not anchors:
        return known
    anchor, depth_of = torch.cat(anchors), torch.cat(depths)
    by_anchor = anchor.argsort(stable=True)
    return Rows(torch.cat([known.anchor_S, anchor[by_anchor]]), torch.cat([known.depth_S, depth_of[by_anchor]]))


def attention_mask(query: Rows, key: Rows) -> torch.Tensor:
    """[Q, K] bool, True where the row may attend: known tokens up to its anchor, and its own chain before it."""
    query_a, key_a = query.anchor_S[:, None], key.anchor_S[None, :]
    query_d, key_d = query.depth_S[:, None], key.depth_S[None, :]
    known = (key_d == 0) & (key_a <= query_a)
    own_chain = (key_a == query_a) & (key_d <= query_d)
    return known | own_chain
