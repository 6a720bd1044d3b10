import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from peagle.drafter import features
from peagle.drafter.data import Sample
from peagle.drafter.features import extract_features, plan_shards
from peagle.drafter.hidden_states import HiddenStateReader
from peagle.drafter.store import FeatureSpec, FeatureStore
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
    with pytest.raises(ConfigError, match="something else: target differ"):
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
