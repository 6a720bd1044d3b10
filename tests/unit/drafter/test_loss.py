import pytest
import torch

from peagle.drafter.loss import CHUNK_ROWS, LOSSES, Targets, greedy_confidence, linear_loss


@pytest.mark.parametrize("num_rows", [7, CHUNK_ROWS, CHUNK_ROWS + 9])
def test_equals_the_plain_computation_and_its_gradients(num_rows: int) -> None:
    from speculators.losses.eager import kl_div_loss

    torch.manual_seed(0)
    hidden = torch.randn(num_rows, 16, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    targets = Targets(torch.randn(12, 16), torch.randn(40, 16))
    position = torch.randint(12, (num_rows,)).sort().values
    row_weight = torch.rand(num_rows)

    fused = linear_loss(hidden, weight, targets, position, row_weight)
    fused.loss.backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    target_logits = (targets.state_PH @ targets.weight_VH.T)[position]
    divergence = kl_div_loss(logits[None], target_logits[None])[0]
    (divergence * row_weight).sum().backward()

    torch.testing.assert_close(fused.divergence_R, divergence.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[0], hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1], weight.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(fused.correct_R, logits.argmax(-1) == target_logits.argmax(-1))


@pytest.mark.parametrize("num_rows", [7, CHUNK_ROWS + 9])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_the_librarys_and_the_divergence_is_told_beside_it(loss: str, num_rows: int) -> None:
    from speculators.losses import resolve_loss_config
    from speculators.losses.eager import kl_div_loss

    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, 16, requires_grad=True), torch.randn(40, 16) / 4
    weight.requires_grad_()
    targets = Targets(torch.randn(12, 16), torch.randn(40, 16) / 4)
    position = torch.randint(12, (num_rows,)).sort().values
    row_weight = torch.rand(num_rows)

    ours = linear_loss(hidden, weight, targets, position, row_weight, loss=loss)
    ours.loss.backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    ((reference, _),) = resolve_loss_config(loss, "eager").values()
    logits = (hidden @ weight.T)[None]
    target_logits = (targets.state_PH @ targets.weight_VH.T)[position][None]
    expected = (reference(logits, target_logits)[0] * row_weight).sum()
    expected.backward()

    torch.testing.assert_close(ours.loss, expected.detach())
    torch.testing.assert_close(grads[0], hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1], weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.divergence_R, kl_div_loss(logits, target_logits)[0].detach(), rtol=1e-4, atol=1e-5)


def test_the_losses_are_all_that_the_library_has() -> None:
    from speculators.losses import utils

    assert set(LOSSES) == set(utils._EAGER_LOSS_FN_MAP)


def test_a_frozen_lm_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    targets = Targets(torch.randn(3, 4), weight)
    linear_loss(hidden, weight, targets, torch.arange(3), torch.ones(3)).loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("num_rows", [7, CHUNK_ROWS + 9])
def test_confidence_is_the_probability_of_the_targets_likeliest_token(num_rows: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, 16), torch.randn(40, 16)
    targets = Targets(torch.randn(12, 16), torch.randn(40, 16))
    position = torch.randint(12, (num_rows,)).sort().values
    likeliest = (targets.state_PH @ targets.weight_VH.T).argmax(-1)[position]
    expected = (hidden @ weight.T).softmax(-1)[torch.arange(num_rows), likeliest]
    torch.testing.assert_close(greedy_confidence(hidden, weight, targets, position), expected)
