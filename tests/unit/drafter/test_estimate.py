from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter import forward
from peagle.drafter.features import Document, FeatureSpec, FeatureStore
from peagle.drafter.forward import drafted_tokens, estimate_acceptance, walk
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.vocabulary import DraftVocabulary


@pytest.fixture
def head(target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> Any:
    return build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_layers=2), vocabulary).eval()


def _draft_as_an_engine_would(head: Any, document: Document, known: int, k: int) -> list[int]:
    """One pass over the tokens up to `known`, then K-1 mask tokens, with the library's layers and plain attention."""
    tokens = document.token_ids_T[1 : known + 1]
    states = head.fc(document.aux_TAH[:known].float())
    token_ids = torch.cat([tokens, torch.full((k - 1,), head.mask_token_id)])
    states = torch.cat([states, head.fc(head.mask_hidden[0]).expand(k - 1, -1)])
    row_states = torch.cat([head.embed_tokens(token_ids), states], dim=-1)[None]
    positions = torch.arange(len(token_ids))[None]
    rotary = head.rotary_emb(row_states, positions)
    head.config.transformer_layer_config._attn_implementation = "eager"
    causal = torch.full((1, 1, len(token_ids), len(token_ids)), float("-inf")).triu(1)
    for layer in head.layers:
        row_states = layer(row_states, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
    draft_ids = head.lm_head(head.norm(row_states[0, -k:])).argmax(-1)
    return [int(i + head.d2t[i]) for i in draft_ids]


@torch.no_grad()
def test_drafts_are_those_of_one_pass_over_mask_tokens(head: Any, store: FeatureStore) -> None:
    document = store[1]
    drafted = drafted_tokens(head, document, 4)
    start = int(document.loss_mask_T.int().argmax())
    implementation = head.config.transformer_layer_config._attn_implementation
    for known in range(start, len(document.token_ids_T)):
        assert drafted[known - 1].tolist() == _draft_as_an_engine_would(head, document, known, 4), known
    assert implementation == "peagle_documents"


def _draft_one_after_the_other(head: Any, document: Document, known: int, k: int) -> list[int]:
    """EAGLE-3's drafting without a cache: all passes again over everything so far, plain causal attention."""
    head.config.transformer_layer_config._attn_implementation = "eager"
    token_ids, drafted = document.token_ids_T[1 : known + 1], []
    states = head.fc(document.aux_TAH[:known].float())
    for _ in range(k):
        row_states = torch.cat([head.embed_tokens(token_ids), states], dim=-1)[None]
        positions = torch.arange(len(token_ids))[None]
        rotary = head.rotary_emb(row_states, positions)
        causal = torch.full((1, 1, len(token_ids), len(token_ids)), float("-inf")).triu(1)
        for layer in head.layers:
            row_states = layer(row_states, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
        draft_id = head.lm_head(head.norm(row_states[0, -1])).argmax(-1)
        drafted.append(int(draft_id + head.d2t[draft_id]))
        token_ids = torch.cat([token_ids, torch.tensor(drafted[-1:])])
        states = torch.cat([states, row_states[0, -1:]])
    return drafted


@torch.no_grad()
def test_an_eagle3_head_goes_on_from_its_own_drafts(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore
) -> None:
    shape = HeadSpec(aux_layers=spec.aux_layers, num_layers=2, algorithm="eagle3")
    head, document = build_head(target, shape, vocabulary).eval(), store[1]
    drafted = drafted_tokens(head, document, 4)
    start = int(document.loss_mask_T.int().argmax())
    for known in range(start, len(document.token_ids_T)):
        assert drafted[known - 1].tolist() == _draft_one_after_the_other(head, document, known, 4), known


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_logits_are_held_a_chunk_at_a_time(
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    store: FeatureStore,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
) -> None:
    shape, held = HeadSpec(aux_layers=spec.aux_layers, algorithm=algorithm), []
    head = build_head(target, shape, vocabulary).eval()
    at_once = drafted_tokens(head, store[1], 4)
    monkeypatch.setattr(forward, "CHUNK_ROWS", 7)
    head.lm_head.register_forward_hook(lambda _module, _inputs, logits: held.append(len(logits)))
    assert torch.equal(drafted_tokens(head, store[1], 4), at_once)
    assert max(held) == 7


def test_the_example_of_the_docstring() -> None:
    drafted = torch.tensor([[6, 7], [7, 8], [8, 0], [0, 0]])
    assert walk([4, 5, 6, 7, 8], drafted, start=1) == [2]


def test_a_wrong_draft_ends_the_step_and_the_next_starts_behind_it() -> None:
    # Response 1 2 3 4 5 6 behind the prompt 0. After 1: 2 right, 9 wrong. After 3: 9 wrong. After 4: 5 6 right.
    drafted = torch.tensor([[2, 9], [9, 9], [9, 5], [5, 6], [9, 9], [9, 9]])
    assert walk([0, 1, 2, 3, 4, 5, 6], drafted, start=1) == [1, 0, 2]


def test_the_statistics_count_each_step_once(head: Any, store: FeatureStore) -> None:
    stats = estimate_acceptance(head, store, range(len(store)), num_speculative_tokens=3)
    responses = sum(int(store[i].loss_mask_T.sum()) for i in range(len(store)))
    assert 0 < stats.num_drafts <= responses - len(store)
    assert stats.num_draft_tokens == 3 * stats.num_drafts
    assert len(stats.accepted_per_position) == 3
