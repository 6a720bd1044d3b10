import pytest
import torch
import torch.nn.functional as F

from peagle.drafter.attention import (
    MIN_BLOCK_ROWS,
    AttentionPlan,
    PaddedPlan,
    block_attention_plan,
    document_attention,
    parallel_attention_plan,
    sequential_attention_plan,
)
from peagle.drafter.batch import attention_mask, sample_blocks, sample_rows

HEADS, KV_HEADS, HEAD_DIM, PADDING = 4, 2, 8, 3


@pytest.fixture(scope="module")
def documents():
    """The rows (head inputs) of four documents: several blocks at every depth, one token, a prompt, no response."""
    torch.manual_seed(0)
    masks = [torch.ones(400), torch.ones(1), torch.cat([torch.zeros(30), torch.ones(90)]), torch.zeros(5)]
    documents = [sample_rows(mask.bool(), num_depths=4, ratio=0.9) for mask in masks]
    assert int((documents[0].depth_S == 3).sum()) > 2 * MIN_BLOCK_ROWS
    return documents


def _full_mask_attention(documents, query, key, value):
    masks = [attention_mask(rows, rows) for rows in documents]
    mask = torch.block_diag(*masks).bool()
    groups = HEADS // KV_HEADS
    key, value = (tensor[:, :, : len(mask)].repeat_interleave(groups, dim=1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query[:, :, : len(mask)], key, value, attn_mask=mask).transpose(1, 2)


def _gradients(output, tensors):
    weight = torch.arange(output.numel(), dtype=output.dtype).sin().view_as(output)
    return torch.autograd.grad((output * weight).sum(), tensors)


def _query_key_value(num_rows):
    query = torch.randn(1, HEADS, num_rows, HEAD_DIM, dtype=torch.float64)
    return query, *(torch.randn(1, KV_HEADS, num_rows, HEAD_DIM, dtype=torch.float64) for _ in range(2))


@pytest.fixture(params=["blocks", "padded"])
def to_form(request):
    """Return a function that converts a plan to its form for CPUs (blocks) or GPUs (padded)."""
    return AttentionPlan.padded if request.param == "padded" else lambda plan: plan


def test_parallel_attention_equals_one_full_mask(documents, to_form):
    num_rows = sum(map(len, documents))
    query, key, value = _query_key_value(num_rows + PADDING)
    output, _ = document_attention(None, query, key, value, to_form(parallel_attention_plan(documents)))
    torch.testing.assert_close(output[:, :num_rows], _full_mask_attention(documents, query, key, value))
    assert output.shape[1] == num_rows + PADDING
    assert not output[:, num_rows:].any()


def test_parallel_gradients_equal_one_full_mask(documents, to_form):
    num_rows = sum(map(len, documents))
    tensors = [tensor.requires_grad_() for tensor in _query_key_value(num_rows)]
    output, _ = document_attention(None, *tensors, to_form(parallel_attention_plan(documents)))
    torch.testing.assert_close(
        _gradients(output, tensors), _gradients(_full_mask_attention(documents, *tensors).contiguous(), tensors)
    )


def test_bf16_gradients_equal_float32_within_rounding(documents, to_form):
    bf16_tensors = [tensor.bfloat16().requires_grad_() for tensor in _query_key_value(sum(map(len, documents)))]
    float32_tensors = [tensor.detach().float().requires_grad_() for tensor in bf16_tensors]
    plan = to_form(parallel_attention_plan(documents))
    bound = 2**-8 if isinstance(plan, AttentionPlan) else 2**-7  # the form for CPUs computes gradients in float32
    gradients, expected = (
        _gradients(document_attention(None, *tensors, plan)[0].float(), tensors)
        for tensors in (bf16_tensors, float32_tensors)
    )
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert float((gradient.float() - exact).norm() / exact.norm()) < bound


def test_sequential_gradients_equal_one_full_mask(documents, to_form):
    tensors = [tensor.requires_grad_() for tensor in _query_key_value(sum(map(len, documents)))]
    depth_S = torch.cat([rows.depth_S for rows in documents])
    rows = torch.nonzero(depth_S == 2).flatten()
    cached = torch.cat([torch.nonzero(depth_S == depth).flatten() for depth in range(3)])
    query, key, value = tensors
    plan = to_form(sequential_attention_plan(documents, 2))
    output, _ = document_attention(None, query[:, :, rows], key[:, :, cached], value[:, :, cached], plan)
    expected = _full_mask_attention(documents, query, key, value)[:, rows]
    torch.testing.assert_close(_gradients(output, tensors), _gradients(expected, tensors))


def test_only_query_key_and_value_are_saved_for_the_gradient():
    rows = sample_rows(torch.ones(2000).bool(), num_depths=4, ratio=0.9)
    query, key, value = (tensor.requires_grad_() for tensor in _query_key_value(len(rows)))
    saved_sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_sizes.append(t.numel()) or t, lambda t: t):
        document_attention(None, query, key, value, parallel_attention_plan([rows]))
    assert sum(saved_sizes) == query.numel() + key.numel() + value.numel()


def test_sequential_attention_equals_one_full_mask(documents, to_form):
    query, key, value = _query_key_value(sum(map(len, documents)))
    expected = _full_mask_attention(documents, query, key, value)
    depth_S = torch.cat([rows.depth_S for rows in documents])
    by_depth = [torch.nonzero(depth_S == depth).flatten() for depth in range(4)]
    for depth, rows in enumerate(by_depth):
        cached = torch.cat(by_depth[: depth + 1])
        plan = to_form(sequential_attention_plan(documents, depth))
        output, _ = document_attention(None, query[:, :, rows], key[:, :, cached], value[:, :, cached], plan)
        torch.testing.assert_close(output, expected[:, rows])


@pytest.mark.parametrize(("num_tokens", "plan_type"), [(400, PaddedPlan), (40_000, AttentionPlan)])
def test_gpu_blocks_are_padded_unless_a_document_is_long(num_tokens, plan_type):
    rows = sample_rows(torch.ones(num_tokens).bool(), num_depths=2, ratio=0.5)
    assert type(parallel_attention_plan([rows]).to("meta")) is plan_type  # "meta" stands for a GPU
    assert type(parallel_attention_plan([rows]).to("cpu")) is AttentionPlan


BLOCK_SIZE, NUM_CONTEXT = 5, 740 + PADDING


@pytest.fixture
def blocks():
    """Two documents of 700 and 40 tokens."""
    masks = [torch.ones(700).bool(), torch.ones(40).bool()]
    return [sample_blocks(mask, num_depths=BLOCK_SIZE - 1, share=0.5) for mask in masks]


def _block_mask(documents):
    starts = torch.cat(
        [torch.full((len(rows.block_anchors),), start) for rows, start in zip(documents, (0, 700), strict=True)]
    )
    anchors = torch.cat([rows.block_anchors for rows in documents]) + starts
    token = torch.arange(NUM_CONTEXT)
    context = (starts[:, None] <= token) & (token <= anchors[:, None])
    own_block = torch.eye(len(anchors)).repeat_interleave(BLOCK_SIZE, dim=1).bool()
    return torch.cat([context, own_block], dim=1).repeat_interleave(BLOCK_SIZE, dim=0)


def test_block_attention_and_gradients_equal_one_full_mask(blocks, to_form):
    mask = _block_mask(blocks)
    num_queries, num_keys = mask.shape
    query = torch.randn(1, HEADS, num_queries, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, HEADS, num_keys, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plan = block_attention_plan(blocks, (0, 700), num_context=NUM_CONTEXT, block_size=BLOCK_SIZE)
    assert len(plan.blocks) > 3
    output, _ = document_attention(None, query, key, value, to_form(plan))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    tensors = (query, key, value)
    torch.testing.assert_close(_gradients(output, tensors), _gradients(expected.contiguous(), tensors))
