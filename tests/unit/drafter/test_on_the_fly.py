import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from peagle.drafter.data import Sample
from peagle.drafter.features import extract_features
from peagle.drafter.head import build_head
from peagle.drafter.head_spec import HeadSpec
from peagle.drafter.hidden_states import HiddenStateReader
from peagle.drafter.on_the_fly import ComputedFeatures
from peagle.drafter.recipe import TrainingConfig
from peagle.drafter.store import Features, FeatureSpec, FeatureStore
from peagle.drafter.training import train
from peagle.drafter.vocabulary import DraftVocabulary

CONFIG = TrainingConfig(num_steps=8, batch_tokens=40, num_depths=3, learning_rate=3e-3, precision="fp32", seed=5)
# States have 8 bits; how the target's documents are batched decides which way some of them are rounded.
BATCHING = 0.01


@pytest.fixture(scope="module")
def half(target: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()


def _losses(
    target: Path, vocabulary: DraftVocabulary, store: Features, folder: Path, config: TrainingConfig = CONFIG
) -> list[float]:
    head = build_head(target, HeadSpec(aux_layers=store.spec.aux_layers, num_depths=3), vocabulary, seed=1)
    train(head, store, range(len(store)), config, folder, fingerprint={})
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("parts_of", [None, 12])
def test_the_curve_is_that_of_stored_features(
    target: Path,
    half: LlamaForCausalLM,
    samples: list[Sample],
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    tmp_path: Path,
    parts_of: int | None,
) -> None:
    config = TrainingConfig(**{**asdict(CONFIG), "micro_batch_tokens": parts_of})
    curves = {}
    for batch_tokens in (1, 4096):  # each document alone, or many at once
        reader = HiddenStateReader(half, spec.aux_layers)
        folder = tmp_path / str(batch_tokens)
        extract_features(samples, lambda reader=reader: reader, spec, folder / "store", batch_tokens=batch_tokens)  # type: ignore[misc]
        computed = ComputedFeatures(samples, lambda reader=reader: reader, spec, batch_tokens=batch_tokens)  # type: ignore[misc]
        stored = FeatureStore(folder / "store")
        for name, store in {"stored": stored, "computed": computed}.items():
            curves[name, batch_tokens] = _losses(target, vocabulary, store, folder / name, config)
    assert curves["computed", 1] == curves["stored", 1]
    assert curves["stored", 4096] == pytest.approx(curves["stored", 1], rel=BATCHING)
    assert curves["computed", 4096] == pytest.approx(curves["stored", 4096], rel=BATCHING)


def test_documents_are_those_of_a_store_also_under_autocast(
    half: LlamaForCausalLM, samples: list[Sample], spec: FeatureSpec, tmp_path: Path
) -> None:
    reader = HiddenStateReader(half, spec.aux_layers)
    extract_features(samples, lambda: reader, spec, tmp_path)
    stored, computed = FeatureStore(tmp_path), ComputedFeatures(samples, lambda: reader, spec)
    everything = range(len(samples))
    with torch.autocast("cpu", torch.bfloat16):
        found = computed.documents(everything)
    for one, other in zip(found, stored.documents(everything), strict=True):
        for name in ("token_ids_T", "loss_mask_T", "aux_TAH", "last_TH"):
            assert torch.equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    assert [computed.num_tokens(i) for i in everything] == [stored.num_tokens(i) for i in everything]


def test_the_target_is_loaded_once_when_states_are_first_asked_for(
    model: LlamaForCausalLM, samples: list[Sample], spec: FeatureSpec
) -> None:
    loaded = []

    def load() -> HiddenStateReader:
        loaded.append(1)
        return HiddenStateReader(model, spec.aux_layers)

    computed = ComputedFeatures(samples, load, spec)
    assert (len(computed), computed.num_tokens(1), loaded) == (8, 25, [])
    computed.documents([1])
    computed.documents([2, 0])
    assert loaded == [1]
