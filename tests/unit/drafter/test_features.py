import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from peagle.drafter import features
from peagle.drafter.features import (
    ComputedFeatures,
    FeatureSpec,
    FeatureStore,
    HiddenStateReader,
    StoreWriter,
    extract_features,
    write_shard,
)
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.training import TrainingConfig, train
from peagle.errors import CapacityError, ConfigError, InputError, PeagleError


def _reference_states(model, token_ids, layers):
    """Return the inputs of the aux layers and the output of the last layer, computed layer by layer."""
    decoder = model.model
    hidden = decoder.embed_tokens(torch.tensor([token_ids]))
    positions = torch.arange(len(token_ids))[None]
    rotary = decoder.rotary_emb(hidden, positions)
    length = len(token_ids)
    causal = torch.full((1, 1, length, length), float("-inf")).triu(1)
    layer_inputs = []
    for layer in decoder.layers:
        layer_inputs.append(hidden[0])
        hidden = layer(hidden, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
    return torch.cat([layer_inputs[i] for i in layers], dim=-1), hidden[0]


@torch.no_grad()
def test_features_are_the_aux_layers_inputs_and_the_last_layers_output(model, store, samples):
    assert len(store) == len(samples)
    for index, sample in enumerate(samples):
        document = store[index]
        aux, last = _reference_states(model, sample.token_ids, store.spec.aux_layers)
        assert document.token_ids_T.tolist() == list(sample.token_ids)
        assert document.loss_mask_T.tolist() == sample.loss_mask
        torch.testing.assert_close(document.aux_TAH.float(), aux, rtol=0.02, atol=0.02)
        torch.testing.assert_close(document.last_TH.float(), last, rtol=0.02, atol=0.02)


def test_interrupted_extraction_resumes(tmp_path, model, samples, spec, monkeypatch):
    monkeypatch.setattr(features.plan_shards, "__defaults__", (30,))  # tokens per shard
    reader = HiddenStateReader(model, spec.aux_layers)
    extract_features(samples, lambda: reader, spec, tmp_path / "uninterrupted")

    class KilledError(Exception):
        pass

    def kill(num_done, _num_shards):
        if num_done == 2:
            raise KilledError

    with pytest.raises(KilledError):
        extract_features(samples, lambda: reader, spec, tmp_path / "interrupted", progress=kill)
    with pytest.raises(InputError, match="not finished"):
        FeatureStore(tmp_path / "interrupted")
    first_shards = sorted((tmp_path / "interrupted").glob("shard-*"))
    modified_at = [file.stat().st_mtime_ns for file in first_shards]
    extract_features(samples, lambda: reader, spec, tmp_path / "interrupted")

    assert [file.stat().st_mtime_ns for file in first_shards] == modified_at
    indexes = [json.loads((tmp_path / name / "index.json").read_text()) for name in ("uninterrupted", "interrupted")]
    assert indexes[0]["shards"] == indexes[1]["shards"]


def test_store_with_another_spec_is_refused(tmp_path, model, samples, spec):
    reader = HiddenStateReader(model, spec.aux_layers)
    extract_features(samples, lambda: reader, spec, tmp_path)
    with pytest.raises(ConfigError, match="its features differ in target"):
        extract_features(samples, lambda: reader, replace(spec, target="another"), tmp_path)


def test_too_little_disk_space_is_refused_before_the_extraction(tmp_path, model, samples, spec, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=rf"{spec.bytes_per_token:,} bytes each(?s:.*)--on-the-fly"):
        extract_features(samples, lambda: HiddenStateReader(model, spec.aux_layers), spec, tmp_path)


CONFIG = TrainingConfig(num_steps=8, batch_tokens=40, num_depths=3, learning_rate=3e-3, precision="fp32", seed=5)
# bf16 states have 8 bits of precision, and the batch size changes how some of them are rounded.
BATCHING_TOLERANCE = 0.01


@pytest.fixture(scope="module")
def bf16_model(target):
    return LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()


def _train_losses(target, vocabulary, store, folder, config=CONFIG):
    head = build_head(target, HeadSpec(aux_layers=store.spec.aux_layers, num_depths=3), vocabulary, seed=1)
    train(head, store, range(len(store)), config, folder, fingerprint={})
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("micro_batch_tokens", [None, 12])
def test_training_with_computed_and_stored_features_is_equal(
    target, bf16_model, samples, spec, vocabulary, tmp_path, micro_batch_tokens
):
    config = replace(CONFIG, micro_batch_tokens=micro_batch_tokens)
    losses = {}
    for batch_tokens in (1, 4096):  # single documents, or all documents in one batch
        reader = HiddenStateReader(bf16_model, spec.aux_layers)
        folder = tmp_path / str(batch_tokens)
        extract_features(samples, lambda reader=reader: reader, spec, folder / "store", batch_tokens=batch_tokens)  # type: ignore[misc]
        computed = ComputedFeatures(samples, lambda reader=reader: reader, spec, batch_tokens=batch_tokens)  # type: ignore[misc]
        stored = FeatureStore(folder / "store")
        for name, store in {"stored": stored, "computed": computed}.items():
            losses[name, batch_tokens] = _train_losses(target, vocabulary, store, folder / name, config)
    assert losses["computed", 1] == losses["stored", 1]
    assert losses["stored", 4096] == pytest.approx(losses["stored", 1], rel=BATCHING_TOLERANCE)
    assert losses["computed", 4096] == pytest.approx(losses["stored", 4096], rel=BATCHING_TOLERANCE)


def test_computed_documents_equal_stored_documents_under_autocast(bf16_model, samples, spec, tmp_path):
    reader = HiddenStateReader(bf16_model, spec.aux_layers)
    extract_features(samples, lambda: reader, spec, tmp_path)
    stored, computed = FeatureStore(tmp_path), ComputedFeatures(samples, lambda: reader, spec)
    all_indices = range(len(samples))
    with torch.autocast("cpu", torch.bfloat16):
        computed_documents = computed.documents(all_indices)
    for computed_document, stored_document in zip(computed_documents, stored.documents(all_indices), strict=True):
        for name in ("token_ids_T", "loss_mask_T", "aux_TAH", "last_TH"):
            computed_tensor, stored_tensor = getattr(computed_document, name), getattr(stored_document, name)
            assert torch.equal(computed_tensor, stored_tensor)
            assert computed_tensor.dtype == stored_tensor.dtype
    assert [computed.num_tokens(i) for i in all_indices] == [stored.num_tokens(i) for i in all_indices]


def test_read_ahead_computes_documents_in_one_batch(model, samples, spec, monkeypatch):
    reader = HiddenStateReader(model, spec.aux_layers)
    computed = ComputedFeatures(samples, lambda: reader, spec)
    separate = computed.documents([0, 1, 2])
    batch_sizes: list[int] = []

    def read(token_ids_BT):
        batch_sizes.append(len(token_ids_BT))
        return HiddenStateReader.read(reader, token_ids_BT)

    monkeypatch.setattr(reader, "read", read)
    computed.read_ahead([0, 1, 2])
    read_ahead_documents = [*computed.documents([2]), *computed.documents([1, 0])]
    assert batch_sizes == [3]
    for index, document in zip((2, 1, 0), read_ahead_documents, strict=True):
        assert torch.equal(document.token_ids_T, separate[index].token_ids_T)
        assert torch.equal(document.aux_TAH, separate[index].aux_TAH)
    computed.read_ahead([1, 1])  # computes document 1 once
    computed.documents([1, 0])  # computes only document 0
    assert batch_sizes == [3, 1, 1]


@pytest.mark.parametrize("num_interruptions", [1, 2, 3])
def test_training_run_with_computed_features_resumes_identically(
    target, bf16_model, samples, spec, vocabulary, tmp_path, num_interruptions
):
    def make_features():
        reader = HiddenStateReader(bf16_model, spec.aux_layers)
        return ComputedFeatures(samples, lambda: reader, spec, batch_tokens=2 * CONFIG.batch_tokens)

    expected = _train_losses(target, vocabulary, make_features(), tmp_path / "uninterrupted")
    head = build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3), vocabulary, seed=1)
    for _ in range(num_interruptions):  # each call stops after one step
        train(head, make_features(), range(len(samples)), CONFIG, tmp_path / "run", fingerprint={}, time_budget_s=0)
    assert _train_losses(target, vocabulary, make_features(), tmp_path / "run") == expected


SPEC = FeatureSpec(target="t", aux_layers=(1,), hidden_size=2, samples="s")


def _shard(*lengths):
    """Return a shard with documents of these lengths."""
    total = sum(lengths)
    return {
        "token_ids": torch.arange(total, dtype=torch.int32),
        "lengths": torch.tensor(lengths),
        "num_prompt_tokens": torch.ones(len(lengths), dtype=torch.int64),
        "aux": torch.zeros(total, 2, dtype=torch.bfloat16),
        "last": torch.zeros(total, 2, dtype=torch.bfloat16),
    }


def test_shards_of_other_processes_are_added_in_any_order(tmp_path):
    writer = StoreWriter(tmp_path, SPEC, num_shards=2)
    checksums = [write_shard(tmp_path, number, _shard(3 + number)) for number in range(2)]
    writer.add_written(1, checksums[1])
    assert (writer.has(0), writer.has(1), writer.num_written, writer.num_shards) == (False, True, 1, 2)
    with pytest.raises(InputError, match="1 of 2 shards"):
        FeatureStore(tmp_path)
    writer.add_written(0, checksums[0])
    assert list(json.loads((tmp_path / "index.json").read_text())["shards"].values()) == checksums
    store = FeatureStore(tmp_path, verify=True)
    assert [store.num_tokens(i) for i in range(2)] == [3, 4]


def test_different_or_missing_shard_is_refused(tmp_path):
    writer = StoreWriter(tmp_path / "store", SPEC, num_shards=1)
    (tmp_path / "workers_disk").mkdir()
    checksum = write_shard(tmp_path / "workers_disk", 0, _shard(3))
    with pytest.raises(PeagleError, match="wrote\n  every node must have access to this folder"):
        writer.add_written(0, checksum)
    write_shard(tmp_path / "store", 0, _shard(4))
    with pytest.raises(PeagleError, match="different from the file that a worker wrote"):
        writer.add_written(0, checksum)
    assert writer.num_written == 0


def test_partial_files_of_killed_writers_are_deleted(tmp_path):
    writer = StoreWriter(tmp_path, SPEC, num_shards=1)
    writer.add(0, _shard(3))
    (tmp_path / "shard-00001.0123.partial").write_bytes(b"cut off")
    writer.remove_partial_files()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "shard-00000.safetensors"]


def test_full_disk_leaves_no_partial_shard(tmp_path, full_disk):
    writer = StoreWriter(tmp_path, SPEC, num_shards=1)
    message = r"shard-00000.safetensors: cannot be written: .*\n  .*--on-the-fly"
    with full_disk(), pytest.raises(CapacityError, match=message):
        writer.add(0, _shard(40_000))
    assert list(tmp_path.iterdir()) == []


def test_damaged_shard_is_detected_and_written_again(tmp_path):
    StoreWriter(tmp_path, SPEC, num_shards=1).add(0, _shard(3))
    file = tmp_path / "shard-00000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(
        InputError, match="does not match its checksum\n  delete it and repeat the command to extract it again"
    ):
        FeatureStore(tmp_path, verify=True)
    file.unlink()
    with pytest.raises(InputError, match="not found\n  repeat the command to extract the shard again"):
        FeatureStore(tmp_path)
    writer = StoreWriter(tmp_path, SPEC, num_shards=1)
    assert not writer.has(0)
    writer.add(0, _shard(3))
    assert len(FeatureStore(tmp_path, verify=True)) == 1
