"""A P-EAGLE head unrolled from an EAGLE-3 head: what its copies and steps do on the way, and which shapes allow it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.batch import TrainingBatch, make_batch, sample_rows
from peagle.drafter.forward import ParallelRows, batch_loss, parallel_rows, parallel_states
from peagle.drafter.head import build_head
from peagle.drafter.head_folder import save_head
from peagle.drafter.head_spec import HeadSpec, require_buildable
from peagle.drafter.store import FeatureSpec, FeatureStore
from peagle.drafter.unroll import unroll
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.errors import ConfigError

NUM_DEPTHS = 4


@pytest.fixture(scope="module")
def eagle3(
    tmp_path_factory: pytest.TempPathFactory, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    head = build_head(target, HeadSpec(aux_layers=spec.aux_layers, algorithm="eagle3"), vocabulary)
    save_head(head, folder, verifier="org/target")
    return folder


@pytest.fixture(scope="module")
def batch(store: FeatureStore) -> TrainingBatch:
    documents = [store[index] for index in range(len(store)) if len(store[index].token_ids_T) > 4]
    rows = [sample_rows(document.loss_mask_T[1:], num_depths=NUM_DEPTHS, ratio=1.0) for document in documents]
    return make_batch(documents, rows)


def _spec(spec: FeatureSpec, eagle3: Path, **changes: Any) -> HeadSpec:
    shape: dict[str, Any] = {
        "aux_layers": spec.aux_layers,
        "num_layers": 3,
        "num_depths": NUM_DEPTHS,
        "init": str(eagle3),
        "further_layers": "unrolled",
        **changes,
    }
    return HeadSpec(**shape)


@torch.no_grad()
def _likeliest(head: Any, batch: TrainingBatch, num_layers: int) -> torch.Tensor:
    """The draft token of every row behind so many layers, [S]."""
    layers = head.layers
    head.layers = layers[:num_layers]
    states = parallel_states(head, batch)[: sum(map(len, batch.documents))]
    head.layers = layers
    drafted: torch.Tensor = head.lm_head(head.norm(states)).argmax(-1)
    return drafted


def _row_before(batch: TrainingBatch, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows at a depth, and for each the row one place before it in its chain."""
    rows = list(zip(batch.anchor_S.tolist(), batch.depth_S.tolist(), strict=True))[: sum(map(len, batch.documents))]
    place = {row: index for index, row in enumerate(rows)}
    own = [row for row in rows if row[1] == depth]
    return (
        torch.tensor([place[row] for row in own]),
        torch.tensor([place[anchor, depth - 1] for anchor, depth in own]),
    )


def _agreement(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left == right).float().mean().item()


def test_a_copy_brings_the_state_of_the_row_before_and_leaves_known_rows(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, eagle3: Path, batch: TrainingBatch
) -> None:
    head = build_head(target, _spec(spec, eagle3), vocabulary)
    before = _likeliest(head, batch, 1)
    own, previous = _row_before(batch, depth=1)
    by_chance = _agreement(before[own], before[previous])
    unroll(head, batch)
    after = _likeliest(head, batch, 2)
    known = batch.depth_S[: len(before)] == 0
    # A state of 32 tells masked rows from known ones badly; how well a real one does it: test_unrolled_head.py.
    assert _agreement(after[own], before[previous]) > by_chance + 0.2
    assert _agreement(after[known], before[known]) > 0.75


def test_every_step_is_wired_and_learns(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, eagle3: Path, batch: TrainingBatch
) -> None:
    head = build_head(target, _spec(spec, eagle3), vocabulary)
    unroll(head, batch)
    loss = batch_loss(head, batch, num_depths=NUM_DEPTHS).loss
    loss.backward()
    assert loss.isfinite()
    for layer in head.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
            assert projection.weight.grad.isfinite().all()
            assert projection.weight.grad.any()


def test_nothing_is_made_on_another_device_than_the_heads(
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    eagle3: Path,
    batch: TrainingBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A default device that holds no data stands for the CPU beside a head on a GPU."""

    def rows_on_the_cpu(head: Any, batch: TrainingBatch) -> ParallelRows:
        with torch.device("cpu"):  # a plan of attention is made there, and then moved
            return parallel_rows(head, batch)

    expected, head = (build_head(target, _spec(spec, eagle3), vocabulary) for _ in range(2))
    unroll(expected, batch)
    monkeypatch.setattr("peagle.drafter.unroll.parallel_rows", rows_on_the_cpu)
    with torch.device("meta"):
        unroll(head, batch)
    for name, parameter in expected.named_parameters():
        assert torch.equal(head.get_parameter(name), parameter), name


def test_documents_without_rows_to_fit_a_step_to_are_named(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, eagle3: Path, store: FeatureStore
) -> None:
    head = build_head(target, _spec(spec, eagle3), vocabulary)
    only_known = sample_rows(store[4].loss_mask_T[1:], num_depths=1, ratio=1.0)
    with pytest.raises(ConfigError, match="rows at depth 1, and those of the documents end at 0") as caught:
        unroll(head, make_batch([store[4]], [only_known]))
    assert "--num-layers" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "2 layers cannot hold them"),
        ({"num_layers": 1}, "1 layers cannot hold them"),
        ({"num_layers": 5}, "5 layers cannot start as the last ones of a target that has 4"),
        ({"num_depths": 1}, "3 layers draft 2 tokens, K_train is 1"),
        ({"algorithm": "eagle3"}, "only an EAGLE-3 head of one layer can be unrolled"),
        ({"init": "warm"}, "only an EAGLE-3 head of one layer can be unrolled"),
    ],
)
def test_what_cannot_be_unrolled_is_refused(
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    eagle3: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_head(target, _spec(spec, eagle3, **changes), vocabulary)


def test_a_head_of_several_layers_is_not_one_step(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    shape = HeadSpec(aux_layers=spec.aux_layers, algorithm="eagle3", num_layers=2)
    save_head(build_head(target, shape, vocabulary), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match="only an EAGLE-3 head of one layer"):
        build_head(target, _spec(spec, tmp_path), vocabulary)


def test_kv_heads_that_cannot_hold_a_state_are_refused_with_the_number_that_can(
    embedded_target: Path, shipped_eagle3: Path
) -> None:
    spec = HeadSpec(
        aux_layers=(2, 15, 29), num_layers=3, init=str(shipped_eagle3), further_layers="unrolled", num_depths=8
    )
    with pytest.raises(ConfigError, match="3 KV heads of 64 cannot bring a state of 576") as refused:
        require_buildable(embedded_target, spec)
    assert refused.value.hint == "give --num-key-value-heads 9"


def test_heads_that_cannot_hold_a_state_at_all_are_refused(
    tmp_path: Path, target: Path, spec: FeatureSpec, eagle3: Path
) -> None:
    config = json.loads((target / "config.json").read_text())
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"] // 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="heads of 4 cannot bring a state of 32 from row to row"):
        require_buildable(tmp_path, _spec(spec, eagle3))


def test_saved_kv_heads_are_repeated_where_the_head_has_more(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, eagle3: Path, batch: TrainingBatch
) -> None:
    few = build_head(target, HeadSpec(aux_layers=spec.aux_layers, init=str(eagle3)), vocabulary)
    many = build_head(target, HeadSpec(aux_layers=spec.aux_layers, init=str(eagle3), num_key_value_heads=4), vocabulary)
    assert many.layers[0].self_attn.v_proj.weight.shape[0] == 2 * few.layers[0].self_attn.v_proj.weight.shape[0]
    with torch.no_grad():
        torch.testing.assert_close(parallel_states(many, batch), parallel_states(few, batch))
