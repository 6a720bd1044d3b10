"""The head's loss, held against `speculators`' own forward pass over the same rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.batch import Rows, TrainingBatch, make_batch, sample_rows
from peagle.drafter.features import Document, FeatureSpec, FeatureStore
from peagle.drafter.forward import batch_loss, head_states
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.loss import Weighting
from peagle.drafter.vocabulary import DraftVocabulary

NUM_DEPTHS = 4


@pytest.fixture(params=[1, 2], ids=["one layer", "two layers"])
def num_layers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def head(num_layers: int, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> Any:
    shape = HeadSpec(aux_layers=spec.aux_layers, num_layers=num_layers, num_depths=NUM_DEPTHS)
    return build_head(target, shape, vocabulary)


@pytest.fixture
def eagle3(num_layers: int, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> Any:
    shape = HeadSpec(aux_layers=spec.aux_layers, num_layers=num_layers, num_depths=NUM_DEPTHS, algorithm="eagle3")
    return build_head(target, shape, vocabulary)


def _all_rows(mask: torch.Tensor) -> Rows:
    return sample_rows(mask, num_depths=NUM_DEPTHS, ratio=1.0)


def _batch(documents: list[Document]) -> TrainingBatch:
    return make_batch(documents, [_all_rows(document.loss_mask_T[1:]) for document in documents])


def _library_loss(head: Any, document: Document, monkeypatch: pytest.MonkeyPatch, **options: Any) -> torch.Tensor:
    """The library's loss, its attention replaced by plain SDPA."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from torch.nn.attention.flex_attention import create_mask

    monkeypatch.setattr(head, "_attn_impl", "sdpa")
    monkeypatch.setattr(head, "_create_mask_fn", create_mask)
    monkeypatch.setattr(head.config.transformer_layer_config, "_attn_implementation", "sdpa")
    length = len(document.token_ids_T)
    shifted = shift_batch(
        {
            "input_ids": document.token_ids_T,
            "hidden_states": document.aux_TAH.float(),
            "verifier_last_hidden_states": document.last_TH.float(),
            "loss_mask": document.loss_mask_T.long(),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    batch = {name: tensor[None] for name, tensor in shifted.items() if name != "lengths"}
    _, loss, _ = head(
        **batch,
        document_ids=torch.zeros(1, length - 1, dtype=torch.long),
        loss_config=resolve_loss_config("kl_div", "eager"),
        **options,
    )
    return loss


def test_loss_and_gradients_equal_the_librarys(head: Any, store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.models.peagle import core

    document = store[4]
    ours = batch_loss(head, _batch([document]), num_depths=NUM_DEPTHS).loss
    ours.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()

    rows = _all_rows(document.loss_mask_T[1:])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (rows.anchor_S, rows.depth_S))
    theirs = _library_loss(head, document, monkeypatch, num_depths=NUM_DEPTHS)
    theirs.backward()

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert {"mask_hidden", "fc.weight", "layers.0.self_attn.k_proj.weight"} <= gradients.keys()
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_an_eagle3_heads_loss_equals_the_librarys_depth_by_depth(
    eagle3: Any, store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library starts a chain at every token, so here all of the document is under the loss."""
    document = replace(store[4], loss_mask_T=torch.ones_like(store[4].loss_mask_T))
    outcome = batch_loss(eagle3, _batch([document]), num_depths=NUM_DEPTHS)
    by_depth = (outcome.divergence_D / outcome.rows_D).cumsum(0)
    for depth in range(NUM_DEPTHS):
        theirs = _library_loss(eagle3, document, monkeypatch, ttt_steps=depth + 1, ttt_step_loss_decay=1.0)
        assert by_depth[depth].item() == pytest.approx(theirs.item(), rel=1e-5), depth


def test_an_eagle3_heads_deepest_rows_train_all_that_led_to_them(eagle3: Any, store: FeatureStore) -> None:
    batch = _batch([store[4]])
    states = head_states(eagle3, batch)
    deepest = torch.nonzero(batch.depth_S[batch.row_R] == NUM_DEPTHS - 1).flatten()
    states[deepest].sum().backward()  # type: ignore[no-untyped-call]
    assert eagle3.fc.weight.grad.abs().sum() > 0
    assert eagle3.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_packed_documents_do_not_see_each_other(head: Any, eagle3: Any, store: FeatureStore) -> None:
    documents = [store[i] for i in (1, 4, 6)]
    for either in (head, eagle3):
        packed = batch_loss(either, _batch(documents), num_depths=NUM_DEPTHS)
        alone = [batch_loss(either, _batch([d]), num_depths=NUM_DEPTHS) for d in documents]
        torch.testing.assert_close(packed.divergence_D, torch.stack([a.divergence_D for a in alone]).sum(0))
        torch.testing.assert_close(packed.rows_D, torch.stack([a.rows_D for a in alone]).sum(0))


def test_depth_decay_moves_the_weight_to_the_first_depth(head: Any, store: FeatureStore) -> None:
    batch = _batch([store[4]])
    flat = batch_loss(head, batch, num_depths=NUM_DEPTHS)
    steep = batch_loss(head, batch, num_depths=NUM_DEPTHS, weighting=Weighting(depth_decay=1e-6))
    first = flat.divergence_D[0] / flat.rows_D[0]
    assert steep.loss.item() == pytest.approx(first.item(), rel=1e-3)
    assert flat.loss.item() == pytest.approx((flat.divergence_D.sum() / flat.rows_D.sum()).item(), rel=1e-5)


def test_a_row_is_accepted_with_all_before_it_in_its_chain(head: Any, eagle3: Any, store: FeatureStore) -> None:
    batch = _batch([store[4], store[6]])
    rows = batch.row_R[: batch.num_loss_rows]
    for either in (head, eagle3):
        torch.manual_seed(1)
        with torch.no_grad():
            for lm_head in (either.lm_head, either.verifier_lm_head):  # two tokens only: half of the rows are right
                row = torch.randn_like(lm_head.weight[0])
                lm_head.weight.zero_()[:2] = torch.stack([row, -row])
            drafts = (head_states(either, batch) @ either.lm_head.weight.T).argmax(-1)[: batch.num_loss_rows]
            wanted = (either.verifier_norm(batch.last_PH) @ either.verifier_lm_head.weight.T).argmax(-1)
            outcome = batch_loss(either, batch, num_depths=NUM_DEPTHS)
        right = (drafts == wanted[batch.target_R[: batch.num_loss_rows]]).tolist()
        places = zip(batch.anchor_S[rows].tolist(), batch.depth_S[rows].tolist(), strict=True)
        by_place = dict(zip(places, right, strict=True))
        expected = [
            sum(all(by_place[anchor, d] for d in range(depth + 1)) for anchor, depth in by_place if depth == deepest)
            for deepest in range(NUM_DEPTHS)
        ]
        assert outcome.accepted_D.tolist() == expected
        assert 0 < outcome.accepted_D[1] < outcome.correct_D[1]
