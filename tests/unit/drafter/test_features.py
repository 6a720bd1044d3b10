import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from peagle.drafter import features
from peagle.drafter.data import Sample
from peagle.drafter.features import (
    ComputedFeatures,
    Features,
    FeatureSpec,
    FeatureStore,
    HiddenStateReader,
    extract_features,
    plan_shards,
)
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.recipe import TrainingConfig
from peagle.drafter.training import train
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.errors import CapacityError, ConfigError, InputError


def _states_by_hand(model: LlamaForCausalLM, token_ids: tuple[int, ...], layers: tuple[int, ...]) -> Any:
    """States entering layers and the final norm, by running the layers one after the other."""
    decoder = model.model
    hidden = decoder.embed_tokens(torch.tensor([token_ids]))
    positions = torch.arange(len(token_ids))[None]
    rotary = decoder.rotary_emb(hidden, positions)
    length = len(token_ids)
    causal = torch.full((1, 1, length, length), float("-inf")).triu(1)
    entering = []
    for layer in decoder.layers:
        entering.append(hidden[0])
        hidden = layer(hidden, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
    return torch.cat([entering[i] for i in layers], dim=-1), hidden[0]


@torch.no_grad()
def test_states_are_those_that_enter_the_layers(
    model: LlamaForCausalLM, store: FeatureStore, samples: list[Sample]
) -> None:
    assert len(store) == len(samples)
    for index, sample in enumerate(samples):
        document = store[index]
        aux, last = _states_by_hand(model, sample.token_ids, store.spec.aux_layers)
        assert document.token_ids_T.tolist() == list(sample.token_ids)
        assert document.loss_mask_T.tolist() == sample.loss_mask
        torch.testing.assert_close(document.aux_TAH.float(), aux, rtol=0.02, atol=0.02)
        torch.testing.assert_close(document.last_TH.float(), last, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_the_last_state_gives_the_targets_own_logits(
    model: LlamaForCausalLM, store: FeatureStore, samples: list[Sample]
) -> None:
    expected = model(torch.tensor([samples[1].token_ids])).logits[0]
    got = model.lm_head(model.model.norm(store[1].last_TH.float()))
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_shards_cover_the_samples_in_order(samples: list[Sample]) -> None:
    shards = plan_shards(samples, shard_tokens=30)
    assert [i for shard in shards for i in shard] == list(range(len(samples)))
    assert len(shards) > 2


def test_an_interrupted_extraction_goes_on_and_gives_the_same(
    tmp_path: Path,
    model: LlamaForCausalLM,
    samples: list[Sample],
    spec: FeatureSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features.plan_shards, "__defaults__", (30,))
    reader = HiddenStateReader(model, spec.aux_layers)
    extract_features(samples, lambda: reader, spec, tmp_path / "whole")

    class KilledError(Exception):
        pass

    def kill(done: int, _total: int) -> None:
        if done == 2:
            raise KilledError

    with pytest.raises(KilledError):
        extract_features(samples, lambda: reader, spec, tmp_path / "cut", progress=kill)
    with pytest.raises(InputError, match="not finished"):
        FeatureStore(tmp_path / "cut")
    written = sorted((tmp_path / "cut").glob("shard-*"))
    times = [file.stat().st_mtime_ns for file in written]
    extract_features(samples, lambda: reader, spec, tmp_path / "cut")

    assert [file.stat().st_mtime_ns for file in written] == times
    index = [json.loads((tmp_path / name / "index.json").read_text()) for name in ("whole", "cut")]
    assert index[0]["shards"] == index[1]["shards"]


def test_a_store_of_something_else_is_refused(
    tmp_path: Path, model: LlamaForCausalLM, samples: list[Sample], spec: FeatureSpec
) -> None:
    from dataclasses import replace

    reader = HiddenStateReader(model, spec.aux_layers)
    extract_features(samples, lambda: reader, spec, tmp_path)
    with pytest.raises(ConfigError, match="has other features: target differ"):
        extract_features(samples, lambda: reader, replace(spec, target="another"), tmp_path)


def test_a_damaged_shard_is_found(
    tmp_path: Path, model: LlamaForCausalLM, samples: list[Sample], spec: FeatureSpec
) -> None:
    extract_features(samples, lambda: HiddenStateReader(model, spec.aux_layers), spec, tmp_path)
    shard = tmp_path / "shard-00000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(bytes(damaged))
    with pytest.raises(InputError, match="checksum"):
        FeatureStore(tmp_path, verify=True)


def test_a_full_disk_is_refused_before_work(
    tmp_path: Path,
    model: LlamaForCausalLM,
    samples: list[Sample],
    spec: FeatureSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=rf"{spec.bytes_per_token:,} bytes each(?s:.*)--on-the-fly"):
        extract_features(samples, lambda: HiddenStateReader(model, spec.aux_layers), spec, tmp_path)


def test_a_target_without_the_layers_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match=r"aux layers \[4\]: the target has layers 0 to 3"):
        HiddenStateReader(model, (1, 4))


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


def test_documents_are_read_ahead_together_and_kept_until_others_are(
    model: LlamaForCausalLM, samples: list[Sample], spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = HiddenStateReader(model, spec.aux_layers)
    computed = ComputedFeatures(samples, lambda: reader, spec)
    alone = computed.documents([0, 1, 2])
    shapes: list[int] = []

    def read(token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(len(token_ids_BT))
        return HiddenStateReader.read(reader, token_ids_BT)

    monkeypatch.setattr(reader, "read", read)
    computed.read_ahead([0, 1, 2])
    ahead = [*computed.documents([2]), *computed.documents([1, 0])]
    assert shapes == [3]
    for index, document in zip((2, 1, 0), ahead, strict=True):
        assert torch.equal(document.token_ids_T, alone[index].token_ids_T)
        assert torch.equal(document.aux_TAH, alone[index].aux_TAH)
    computed.read_ahead([1, 1])
    computed.documents([1, 0])
    assert shapes == [3, 1, 1]


@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_a_resumed_training_reads_ahead_as_the_uninterrupted_one(
    target: Path,
    half: LlamaForCausalLM,
    samples: list[Sample],
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    tmp_path: Path,
    steps_before: int,
) -> None:
    def computed() -> ComputedFeatures:
        reader = HiddenStateReader(half, spec.aux_layers)
        return ComputedFeatures(samples, lambda: reader, spec, batch_tokens=2 * CONFIG.batch_tokens)

    whole = _losses(target, vocabulary, computed(), tmp_path / "whole")
    head = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)
    for _ in range(steps_before):
        train(head, computed(), range(len(samples)), CONFIG, tmp_path / "cut", fingerprint={}, time_budget_s=0)
    assert _losses(target, vocabulary, computed(), tmp_path / "cut") == whole
