"""Batches of the head's training. Here, rows are inputs (anchor, depth) of the head, and `_S` is their dimension."""

import torch

from peagle.drafter.batch import attention_mask, sample_blocks, sample_rows

MASK = torch.tensor([False] * 10 + [True] * 50)  # a prompt of 10 tokens and a response of 50


def test_docstring_example_of_sample_rows():
    rows = sample_rows(torch.tensor([False, False, True, True, True]), num_depths=3, ratio=1.0)
    assert rows.anchor_S.tolist() == [0, 1, 2, 3, 4, 2, 2, 3]
    assert rows.depth_S.tolist() == [0, 0, 0, 0, 0, 1, 2, 1]


def test_anchors_of_each_depth_are_among_those_of_the_previous_depth():
    rows = sample_rows(MASK, num_depths=8, ratio=0.8, generator=torch.Generator().manual_seed(1))
    anchors = [set(rows.anchor_S[rows.depth_S == depth].tolist()) for depth in range(8)]
    assert anchors[0] == set(range(60))
    for depth in range(2, 8):
        assert anchors[depth] <= anchors[depth - 1]
    for depth in range(1, 8):
        assert round(50 * 0.8**depth) - depth <= len(anchors[depth]) <= round(50 * 0.8**depth)


def test_attention_mask_equals_that_of_speculators():
    from speculators.models.peagle.attention import create_peagle_mask_mod

    rows = sample_rows(MASK, num_depths=4, ratio=0.8, generator=torch.Generator().manual_seed(0))
    mask_mod = create_peagle_mask_mod(rows.anchor_S, rows.depth_S, torch.zeros(60, dtype=torch.long))
    indices = torch.arange(len(rows.anchor_S))
    expected = mask_mod(0, 0, indices[:, None], indices[None, :])
    assert torch.equal(attention_mask(rows, rows), expected)


def test_rows_attend_only_to_their_chain_and_known_tokens_up_to_its_anchor():
    rows = sample_rows(MASK, num_depths=4, ratio=1.0)
    mask = attention_mask(rows, rows)
    query, key = torch.nonzero(mask, as_tuple=True)
    is_known = rows.depth_S[key] == 0
    assert (rows.anchor_S[key][is_known] <= rows.anchor_S[query][is_known]).all()
    assert (rows.anchor_S[key][~is_known] == rows.anchor_S[query][~is_known]).all()
    assert mask.diagonal().all()


def test_blocks_have_all_depths_of_a_share_of_the_anchors():
    rows = sample_blocks(MASK, num_depths=4, share=0.3, generator=torch.Generator().manual_seed(0))
    anchors = rows.block_anchors.tolist()
    assert len(set(anchors)) == 15
    assert anchors == sorted(anchors)
    assert min(anchors) >= 10
    assert rows.anchor_S.tolist() == [anchor for anchor in anchors for _ in range(4)]
    assert rows.depth_S.tolist() == [0, 1, 2, 3] * 15


def test_a_short_response_has_at_least_one_block():
    assert len(sample_blocks(torch.tensor([False, True, True]), num_depths=4, share=0.01)) == 4
