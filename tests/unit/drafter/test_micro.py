"""Steps in pieces: the gradients of the parts add up to those of the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from peagle.drafter.batch import Rows, TrainingBatch, make_batch, sample_rows
from peagle.drafter.features import Document, FeatureSpec, FeatureStore
from peagle.drafter.forward import batch_loss
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.loss import Weighting, fixed_weight
from peagle.drafter.recipe import TrainingConfig
from peagle.drafter.training import micro_batches, partition_rows
from peagle.drafter.vocabulary import DraftVocabulary

NUM_DEPTHS = 4
NUM_TOKENS = 230
CONFIG = TrainingConfig(num_steps=1, num_depths=NUM_DEPTHS, seed=3)


@pytest.fixture
def document(spec: FeatureSpec) -> Document:
    """A prompt of 30 tokens and a response of 200."""
    torch.manual_seed(2)
    return Document(
        token_ids_T=torch.randint(96, (NUM_TOKENS,)),
        loss_mask_T=torch.arange(NUM_TOKENS) >= 30,
        aux_TAH=torch.randn(NUM_TOKENS, 3 * spec.hidden_size),
        last_TH=torch.randn(NUM_TOKENS, spec.hidden_size),
    )


@pytest.fixture
def rows(document: Document) -> Rows:
    return sample_rows(document.loss_mask_T[1:], num_depths=NUM_DEPTHS, ratio=0.8)


@pytest.fixture
def norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's norm computes in float32 whatever comes in."""

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled  # type: ignore[no-any-return]

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def _gradients(head: Any, batches: list[TrainingBatch], *, dpace: bool) -> dict[str, torch.Tensor]:
    head.zero_grad()
    weighting = Weighting(depth_decay=0.9, dpace=dpace, cod_ratio=0.8)
    total = torch.stack([fixed_weight(batch, weighting).double().sum() for batch in batches]).sum()
    for batch in batches:
        loss = batch_loss(head, batch, num_depths=NUM_DEPTHS, weighting=weighting, total_weight=total).loss
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in head.named_parameters() if parameter.grad is not None}


@pytest.mark.usefixtures("norms_in_double")
@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
@pytest.mark.parametrize(("num_parts", "dpace"), [(2, False), (8, False), (8, True)])
def test_gradients_of_the_parts_add_up_to_those_of_the_whole(
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    document: Document,
    rows: Rows,
    algorithm: str,
    num_parts: int,
    dpace: bool,
) -> None:
    shape = HeadSpec(
        aux_layers=spec.aux_layers, num_layers=2, num_depths=NUM_DEPTHS, algorithm=algorithm, train_lm_head=True
    )
    head = build_head(target, shape, vocabulary).double()
    whole = _gradients(head, [make_batch([document], [rows])], dpace=dpace)
    parts = partition_rows(rows, num_parts)
    assert len(parts) == num_parts
    summed = _gradients(head, [make_batch([document], [part]) for part in parts], dpace=dpace)
    assert {"fc.weight", "lm_head.weight", "layers.1.mlp.up_proj.weight"} <= whole.keys() == summed.keys()
    for name, gradient in whole.items():
        assert gradient.dtype == torch.float64
        difference = (summed[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 1e-9, name


def test_parts_hold_each_loss_row_once_and_are_of_about_equal_length(document: Document, rows: Rows) -> None:
    parts = partition_rows(rows, 4)
    counted: list[tuple[int, int]] = []
    for part in parts:
        counts = part.anchor_S >= part.first_anchor
        counted += zip(part.anchor_S[counts].tolist(), part.depth_S[counts].tolist(), strict=True)
    assert sorted(counted) == sorted(zip(rows.anchor_S.tolist(), rows.depth_S.tolist(), strict=True))
    own = [int((part.anchor_S >= part.first_anchor).sum()) for part in parts]
    assert max(own) - min(own) <= 2 * NUM_DEPTHS
    assert all(len(part) < len(rows) for part in parts)


def test_a_document_of_one_row_is_one_part() -> None:
    alone = sample_rows(torch.ones(1, dtype=torch.bool), num_depths=NUM_DEPTHS, ratio=1.0)
    assert [len(part) for part in partition_rows(alone, 3)] == [1]


def test_a_step_is_cut_where_the_limit_says(store: FeatureStore) -> None:
    documents = list(range(len(store)))
    whole = list(micro_batches(store, documents, CONFIG, step=5))
    assert [batch.num_tokens for batch in whole] == [sum(map(store.num_tokens, documents))]

    limit = 26
    config = TrainingConfig(num_steps=1, num_depths=NUM_DEPTHS, seed=3, micro_batch_tokens=limit)
    pieces = list(micro_batches(store, documents, config, step=5))
    in_parts = [index for index in documents if store.num_tokens(index) > limit]
    assert not in_parts
    assert max(batch.num_tokens for batch in pieces) <= limit
    assert sum(batch.num_loss_rows for batch in pieces) == whole[0].num_loss_rows


def test_a_document_over_the_limit_comes_in_parts_with_the_rows_of_the_whole(store: FeatureStore) -> None:
    longest = max(range(len(store)), key=store.num_tokens)
    config = TrainingConfig(num_steps=1, num_depths=NUM_DEPTHS, seed=3, micro_batch_tokens=10)
    (whole,) = micro_batches(store, [longest], CONFIG, step=1)
    parts = list(micro_batches(store, [longest], config, step=1))
    assert len(parts) == 3
    assert len({batch.aux_TAH.data_ptr() for batch in parts}) == 1  # held once, however many parts wait
    assert torch.equal(parts[0].aux_TAH, whole.aux_TAH)
    assert sum(batch.num_loss_rows for batch in parts) == whole.num_loss_rows
