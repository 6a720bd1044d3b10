"""Micro-batches: split a step so that it fits into memory.

Sequence partitioning (P-EAGLE, arXiv 2602.01469, algorithm 1) splits a long document. Its loss is a sum over rows,
and a chain attends to the known tokens up to its anchor and to itself. So each part computes some of the chains and
the known tokens before them, and the gradients of the parts add up to those of the whole.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from peagle.drafter.batch import Rows, TrainingBatch, make_batch, sample_rows
from peagle.drafter.recipe import TrainingConfig
from peagle.drafter.store import Document, Features


def micro_batches(
    store: Features, documents: Sequence[int], config: TrainingConfig, *, step: int
) -> Iterator[TrainingBatch]:
    """Yield the batches of a step, as few as `config.micro_batch_tokens` allows."""
    limit = config.micro_batch_tokens
    packed: list[int] = []
    for index in documents:
        tokens = store.num_tokens(index)
        if limit is not None and tokens > limit:
            (document,) = store.documents([index])
            rows = _draw(document.loss_mask_T, index, config, step)
            yield from _in_parts(document, partition_rows(rows, -(-tokens // limit)))
        else:
            if limit is not None and packed and tokens + sum(map(store.num_tokens, packed)) > limit:
                yield sampled_batch(store, packed, config, step)
                packed = []
            packed.append(index)
    if packed:
        yield sampled_batch(store, packed, config, step)


def partition_rows(rows: Rows, num_parts: int) -> list[Rows]:
    """Split a document's rows by ranges of anchors into parts of about equal length.

    Each part contains the chains of its anchors and the known tokens up to its last anchor. Rows before
    `Rows.first_anchor` bear no loss.
    """
    last_anchor = int(rows.anchor_S[-1]) if len(rows) > rows.num_known else rows.num_known - 1
    by_anchor = torch.bincount(rows.anchor_S, minlength=rows.num_known).cumsum(0)
    goals = torch.arange(1, num_parts) * int(by_anchor[-1]) // num_parts
    cuts = [0, *torch.searchsorted(by_anchor, goals).add(1).tolist(), max(rows.num_known, last_anchor + 1)]
    parts = []
    for start, stop in itertools.pairwise(cuts):
        if start < stop:
            known = (rows.depth_S == 0) & (rows.anchor_S < stop)
            own = (rows.depth_S > 0) & (rows.anchor_S >= start) & (rows.anchor_S < stop)
            chosen = torch.nonzero(known | own).flatten()
            parts.append(Rows(rows.anchor_S[chosen], rows.depth_S[chosen], first_anchor=start))
    return parts


def _in_parts(document: Document, parts: Sequence[Rows]) -> Iterator[TrainingBatch]:
    """Yield a batch for each part. The batches share the document's features in memory."""
    first = make_batch([document], [parts[0]])
    yield first
    for rows in parts[1:]:
        part = make_batch([document], [rows])
        yield replace(part, token_ids_T=first.token_ids_T, aux_TAH=first.aux_TAH, last_PH=first.last_PH)


def sampled_batch(store: Features, documents: Sequence[int], config: TrainingConfig, step: int) -> TrainingBatch:
    """Pack whole documents, with the rows that COD sampling draws for a step."""
    loaded = store.documents(documents)
    rows = [_draw(document.loss_mask_T, index, config, step) for index, document in zip(documents, loaded, strict=True)]
    return make_batch(loaded, rows)


def _draw(loss_mask_T: torch.Tensor, index: int, config: TrainingConfig, step: int) -> Rows:
    """Draw the rows of a document at a step, independently of other documents and workers."""
    seed = random.Random(f"{config.seed} {step} {index}").getrandbits(63)
    return sample_rows(
        loss_mask_T[1:],
        num_depths=config.num_depths,
        ratio=config.cod_ratio,
        generator=torch.Generator().manual_seed(seed),
    )
