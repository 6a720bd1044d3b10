import pytest
import torch

from peagle.drafter.batch import Rows, make_batch
from peagle.drafter.loss import (
    CHUNK_ROWS,
    Targets,
    Weighting,
    dpace_weight,
    greedy_confidence,
    linear_loss,
)


@pytest.mark.parametrize("num_rows", [7, CHUNK_ROWS, CHUNK_ROWS + 9])
def test_fused_loss_and_gradients_equal_the_plain_computation(num_rows):
    from speculators.losses.eager import kl_div_loss

    torch.manual_seed(0)
    hidden = torch.randn(num_rows, 16, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    targets = Targets(torch.randn(12, 16), torch.randn(40, 16))
    position = torch.randint(12, (num_rows,)).sort().values
    row_weight = torch.rand(num_rows)

    fused = linear_loss(hidden, weight, targets, position, row_weight)
    fused.loss.backward()
    fused_gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    target_logits = (targets.state_PH @ targets.weight_VH.T)[position]
    divergence = kl_div_loss(logits[None], target_logits[None])[0]
    (divergence * row_weight).sum().backward()

    torch.testing.assert_close(fused.divergence_R, divergence.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused_gradients[0], hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused_gradients[1], weight.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(fused.correct_R, logits.argmax(-1) == target_logits.argmax(-1))


def test_a_frozen_lm_head_gets_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    targets = Targets(torch.randn(3, 4), weight)
    linear_loss(hidden, weight, targets, torch.arange(3), torch.ones(3)).loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("num_rows", [7, CHUNK_ROWS + 9])
def test_confidence_equals_the_plain_computation(num_rows):
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, 16), torch.randn(40, 16)
    targets = Targets(torch.randn(12, 16), torch.randn(40, 16))
    position = torch.randint(12, (num_rows,)).sort().values
    target_ids = (targets.state_PH @ targets.weight_VH.T).argmax(-1)[position]
    expected = (hidden @ weight.T).softmax(-1)[torch.arange(num_rows), target_ids]
    torch.testing.assert_close(greedy_confidence(hidden, weight, targets, position), expected)


CONFIDENCES = torch.tensor([0.9, 0.5, 0.2, 0.7])  # of the rows of one chain, by depth
DPACE = Weighting(dpace=True)


@pytest.fixture
def anchor(store):
    """The position of a token with a full chain of loss tokens after it: the fourth token of the response."""
    return int(store[1].loss_mask_T[1:].int().argmax()) + 3


def _batch(store, anchor, num_depths):
    document = store[1]
    num_known = len(document.token_ids_T) - 1
    depths = torch.arange(1, num_depths)
    rows = Rows(
        torch.cat([torch.arange(num_known), torch.full_like(depths, anchor)]),
        torch.cat([torch.zeros(num_known, dtype=torch.long), depths]),
    )
    return make_batch([document], [rows])


def _chain_weights(batch, anchor, weighting):
    """Return the D-PACE weights of the chain that starts at `anchor`, by depth."""
    rows = batch.row_R[: batch.num_loss_rows]
    in_chain = batch.anchor_S[rows] == anchor
    confidence = torch.full((len(batch.row_R),), 0.1)
    confidence[: batch.num_loss_rows][in_chain] = CONFIDENCES[batch.depth_S[rows][in_chain]]
    weight = dpace_weight(batch, weighting, confidence)[: batch.num_loss_rows]
    return weight[in_chain][batch.depth_S[rows][in_chain].argsort()]


def test_dpace_weights_are_the_gradient_of_the_expected_acceptance_length(store, anchor):
    # D-PACE smooths confidences with alpha=0.5, as speculators does.
    log_confidences = (0.5 * CONFIDENCES + 0.5).log().requires_grad_()
    log_confidences.cumsum(0).exp().sum().backward()
    torch.testing.assert_close(_chain_weights(_batch(store, anchor, 4), anchor, DPACE), log_confidences.grad)


def test_dpace_weights_equal_those_of_speculators(store, anchor):
    from speculators.losses import dpace_loss_decay

    reference = dpace_loss_decay(
        torch.arange(4)[None],
        loss_mask=torch.ones(1, 4),
        block_size=4,
        dpace_alpha=0.5,
        elementwise_loss=-CONFIDENCES.log()[None],
    )
    torch.testing.assert_close(_chain_weights(_batch(store, anchor, 4), anchor, DPACE), reference[0])


def test_dpace_weights_are_unbiased_with_shortened_chains(store, anchor):
    ratio = 0.6
    full_chain = _chain_weights(_batch(store, anchor, 4), anchor, DPACE)
    mean = torch.zeros(4)
    for num_depths in range(1, 5):
        # The probability that a chain ends at this depth.
        probability = ratio ** (num_depths - 1) * (1 - ratio if num_depths < 4 else 1)
        shortened = _chain_weights(_batch(store, anchor, num_depths), anchor, Weighting(dpace=True, cod_ratio=ratio))
        mean[:num_depths] += probability * shortened
    torch.testing.assert_close(mean, full_chain)
