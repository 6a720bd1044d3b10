import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from peagle.drafter.features import FeatureSpec, FeatureStore, StoreWriter, write_shard
from peagle.errors import CapacityError, InputError, PeagleError

SPEC = FeatureSpec(target="t", aux_layers=(1,), hidden_size=2, samples="s")


def _shard(*lengths: int) -> dict[str, torch.Tensor]:
    total = sum(lengths)
    return {
        "token_ids": torch.arange(total, dtype=torch.int32),
        "lengths": torch.tensor(lengths),
        "num_prompt_tokens": torch.ones(len(lengths), dtype=torch.int64),
        "aux": torch.zeros(total, 2, dtype=torch.bfloat16),
        "last": torch.zeros(total, 2, dtype=torch.bfloat16),
    }


def test_shards_that_others_wrote_are_taken_in_any_order(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, SPEC, num_shards=2)
    checksums = [write_shard(tmp_path, number, _shard(3 + number)) for number in range(2)]
    writer.take(1, checksums[1])
    assert (writer.has(0), writer.has(1), writer.num_written, writer.num_shards) == (False, True, 1, 2)
    with pytest.raises(InputError, match="1 of 2 shards"):
        FeatureStore(tmp_path)
    writer.take(0, checksums[0])
    assert list(json.loads((tmp_path / "index.json").read_text())["shards"].values()) == checksums
    store = FeatureStore(tmp_path, verify=True)
    assert [store.num_tokens(i) for i in range(2)] == [3, 4]


def test_a_shard_that_is_not_here_as_it_was_written_is_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "here", SPEC, num_shards=1)
    (tmp_path / "elsewhere").mkdir()
    checksum = write_shard(tmp_path / "elsewhere", 0, _shard(3))
    with pytest.raises(PeagleError, match="wrote\n  every node must have access to this folder"):
        writer.take(0, checksum)
    write_shard(tmp_path / "here", 0, _shard(4))
    with pytest.raises(PeagleError, match="different from the file that a worker wrote"):
        writer.take(0, checksum)
    assert writer.num_written == 0


def test_what_killed_writers_left_is_deleted(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, SPEC, num_shards=1)
    writer.add(0, _shard(3))
    (tmp_path / "shard-00001.0123.partial").write_bytes(b"cut off")
    writer.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "shard-00000.safetensors"]


def test_a_disk_that_fills_up_leaves_no_part_of_a_shard(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    writer = StoreWriter(tmp_path, SPEC, num_shards=1)
    told = r"shard-00000.safetensors: cannot be written: .*\n  .*--on-the-fly"
    with full_disk(), pytest.raises(CapacityError, match=told):
        writer.add(0, _shard(40_000))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_shard_is_told_and_extracted_again_once_deleted(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match="not found\n  repeat the command to extract it again"):
        FeatureStore(tmp_path)
    writer = StoreWriter(tmp_path, SPEC, num_shards=1)
    assert not writer.has(0)
    writer.add(0, _shard(3))
    assert len(FeatureStore(tmp_path, verify=True)) == 1
