import copy
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.features import FeatureSpec, FeatureStore
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.metrics import TrainingProgress
from peagle.drafter.recipe import TrainingConfig
from peagle.drafter.training import Checkpoint, HeadOptimizer, TrainingOutcome, load_checkpoint, save_checkpoint, train
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.drafter.workers import SingleProcess
from peagle.errors import CapacityError, ConfigError, DivergedError

CONFIG = TrainingConfig(
    num_steps=9, batch_tokens=40, num_depths=3, learning_rate=3e-3, warmup_steps=2, precision="fp32", seed=5
)


class KilledError(Exception):
    """Stands for kill -9: nothing after it runs."""


@pytest.fixture
def head(target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> Any:
    return build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)


def _train(
    head: Any, store: FeatureStore, folder: Path, config: TrainingConfig = CONFIG, **more: Any
) -> TrainingOutcome:
    return train(head, store, range(len(store)), config, folder, fingerprint={"head": "x"}, **more)


def _curve(folder: Path) -> list[tuple[int, float, list[float]]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"], line["accuracy"]) for line in map(json.loads, lines)]


def test_training_lowers_the_loss(head: Any, store: FeatureStore, tmp_path: Path) -> None:
    config = TrainingConfig(
        num_steps=60, batch_tokens=200, num_depths=3, cod_ratio=1.0, learning_rate=3e-3, precision="fp32"
    )
    outcome = _train(head, store, tmp_path, config)
    losses = [loss for _, loss, _ in _curve(tmp_path)]
    assert outcome.finished
    assert outcome.step == 60
    assert losses[-1] < 0.7 * losses[0]


def test_a_worker_takes_the_weights_that_the_first_one_tells(
    head: Any, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore, tmp_path: Path
) -> None:
    class Told(SingleProcess):
        def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
            first = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)
            with torch.no_grad():
                for tensor, told in zip(tensors, [p for p in first.parameters() if p.requires_grad], strict=True):
                    tensor.copy_(told)

    _train(head, store, tmp_path / "first")
    other = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3, init="random"), vocabulary, seed=2)
    _train(other, store, tmp_path / "other", workers=Told())
    assert _curve(tmp_path / "other") == _curve(tmp_path / "first")


@pytest.mark.parametrize("killed_after", [1, 5])
def test_a_killed_training_retraces_the_uninterrupted_curve(
    head: Any,
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    store: FeatureStore,
    tmp_path: Path,
    killed_after: int,
) -> None:
    fresh = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)
    resumed = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)
    _train(head, store, tmp_path / "whole")
    every_step = TrainingConfig(**{**_as_dict(CONFIG), "checkpoint_every_s": 1e-9})

    def kill(progress: TrainingProgress) -> None:
        if progress.step > killed_after:
            raise KilledError

    with pytest.raises(KilledError):
        _train(fresh, store, tmp_path / "cut", every_step, progress=kill)
    assert len(_curve(tmp_path / "cut")) == killed_after + 1  # one step beyond the checkpoint, to be done again
    _train(resumed, store, tmp_path / "cut", every_step)

    assert _curve(tmp_path / "cut") == _curve(tmp_path / "whole")
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name)), name


def test_a_time_budget_stops_and_the_same_call_goes_on(head: Any, store: FeatureStore, tmp_path: Path) -> None:
    first = _train(head, store, tmp_path, time_budget_s=1e-9)
    assert (first.finished, first.step) == (False, 1)
    second = _train(head, store, tmp_path)
    assert (second.finished, second.step) == (True, CONFIG.num_steps)
    assert [step for step, _, _ in _curve(tmp_path)] == list(range(1, CONFIG.num_steps + 1))


def test_documents_in_parts_retrace_the_curve_of_whole_ones(
    head: Any, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore, tmp_path: Path
) -> None:
    in_parts = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)
    _train(head, store, tmp_path / "whole")
    _train(in_parts, store, tmp_path / "parts", TrainingConfig(**{**_as_dict(CONFIG), "micro_batch_tokens": 9}))
    losses = [[loss for _, loss, _ in _curve(tmp_path / name)] for name in ("parts", "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_denormals_are_zero_within_a_step_and_nowhere_else(head: Any, store: FeatureStore, tmp_path: Path) -> None:
    within, outside = [], []

    class Looking(SingleProcess):
        def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
            within.append(_keeps_denormals())

    _train(head, store, tmp_path, workers=Looking(), progress=lambda _: outside.append(_keeps_denormals()))
    assert within
    assert not any(within)
    assert outside == [True] * CONFIG.num_steps


def _keeps_denormals() -> bool:
    return bool((torch.full((8,), 1e-40) * torch.ones(8)).any())


def test_another_recipe_is_refused_with_its_name(head: Any, store: FeatureStore, tmp_path: Path) -> None:
    _train(head, store, tmp_path, time_budget_s=1e-9)
    other = TrainingConfig(**{**_as_dict(CONFIG), "learning_rate": 1e-4})
    with pytest.raises(ConfigError, match="a different learning_rate"):
        _train(head, store, tmp_path, other)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    head: Any, store: FeatureStore, tmp_path: Path
) -> None:
    _train(head, store, tmp_path, time_budget_s=1e-9)
    good = (tmp_path / "checkpoint.pt").read_bytes()
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    checkpoint["weights"]["norm.weight"].fill_(float("nan"))
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    poisoned = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(DivergedError, match=r"step 1: the loss is not finite; documents row \d, row \d"):
        _train(head, store, tmp_path, name_of="row {}".format)
    assert (tmp_path / "checkpoint.pt").read_bytes() == poisoned != good


def test_a_full_disk_stops_and_keeps_the_checkpoint(
    head: Any, store: FeatureStore, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    _train(head, store, tmp_path, time_budget_s=1e-9)
    good = (tmp_path / "checkpoint.pt").read_bytes()
    told = r"cannot be written: .*\n  free some space, then repeat the command to resume"
    with full_disk(), pytest.raises(CapacityError, match=told):
        _train(head, store, tmp_path, time_budget_s=1e-9)
    assert (tmp_path / "checkpoint.pt").read_bytes() == good
    assert _train(head, store, tmp_path).finished
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.pt", "metrics.jsonl"]


def test_the_learning_rate_rises_and_falls() -> None:
    config = TrainingConfig(num_steps=110, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    assert config.learning_rate_at(0) == pytest.approx(0.1)
    assert config.learning_rate_at(9) == config.learning_rate_at(10) == pytest.approx(1.0)
    assert config.learning_rate_at(60) == pytest.approx(0.55)
    assert config.learning_rate_at(110) == pytest.approx(0.1)


def _as_dict(config: TrainingConfig) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(config)


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


def test_a_checkpoint_that_names_how_layers_were_added_still_resumes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(
        step=1,
        weights={},
        optimizer={},
        fingerprint={"head": {"num_layers": 3, "further_layers": "unrolled"}, "seed": 0},
        num_tokens=0,
        train_s=0.0,
        metrics_bytes=0,
    )
    save_checkpoint(checkpoint, tmp_path)
    loaded = load_checkpoint(tmp_path, {"head": {"num_layers": 3}, "seed": 0})
    assert loaded is not None
    assert loaded.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
