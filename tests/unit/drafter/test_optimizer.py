import copy

import pytest
import torch

from peagle.drafter.optimizer import HeadOptimizer
from peagle.drafter.recipe import TrainingConfig

NAMES = {
    "layers.0.mlp.up_proj.weight": (24, 16),
    "lm_head.weight": (32, 16),
    "embed_tokens.weight": (32, 16),
    "norm.weight": (16,),
    "mask_hidden": (1, 1, 16),
}
LEARNING_RATE = 1e-3


@pytest.fixture
def parameters():
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in NAMES.items()}


def step(parameters, optimizer, learning_rate=LEARNING_RATE):
    """One step from a random gradient; how far each parameter moved."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.set_learning_rate(learning_rate)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())
    return {name: before[name] - parameter.detach() for name, parameter in parameters.items()}


def make(parameters, **changes):
    return HeadOptimizer(parameters, TrainingConfig(num_steps=1, weight_decay=0.0, **changes))


def spread(matrix):
    singular = torch.linalg.svdvals(matrix)
    return float(singular.max() / singular.min())


def test_muon_moves_the_matrices_of_layers_alike_in_all_directions_and_adamw_everything_else(parameters):
    moved = step(parameters, make(parameters, optimizer="muon", learning_rate=1.0, muon_learning_rate=2.0))
    assert spread(moved.pop("layers.0.mlp.up_proj.weight")) < 3 < spread(torch.randn(24, 16))
    for name, delta in moved.items():  # AdamW's first step is the gradient's sign
        torch.testing.assert_close(delta.abs(), torch.full_like(delta, LEARNING_RATE), msg=name)


def test_adamw_alone_moves_matrices_too(parameters):
    for delta in step(parameters, make(parameters, optimizer="adamw")).values():
        torch.testing.assert_close(delta.abs(), torch.full_like(delta, LEARNING_RATE))


def test_muons_learning_rate_keeps_its_ratio_to_adamws(parameters):
    moved = [
        step(parameters, make(parameters, learning_rate=1.0, muon_learning_rate=ratio))["layers.0.mlp.up_proj.weight"]
        for ratio in (1.0, 3.0)
    ]
    assert float(moved[1].norm() / moved[0].norm()) == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_saved_state_goes_on_as_if_never_saved(parameters, optimizer):
    first = make(parameters, optimizer=optimizer)
    step(parameters, first)
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    second = make(copies, optimizer=optimizer)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # as a file would
    torch.manual_seed(1)
    moved = step(parameters, first)
    torch.manual_seed(1)
    assert all(torch.equal(delta, moved[name]) for name, delta in step(copies, second).items())
