"""The target's hidden states, computed once and stored: what the head reads, and what it is measured against.

For each token: the states ENTERING the aux layers (vLLM's `aux_hidden_state_layers`, the paper's 2, L/2, L-1), side by
side, and the state ENTERING the final norm, from which the target's own distribution follows. Each shard covers a
fixed range of the samples, so an interrupted extraction goes on where it stopped, and shards can be computed anywhere
in any order. This file cuts and fills shards; how they lie on the disk is store.py's.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.drafter.data import Sample
from peagle.drafter.hidden_states import BATCH_TOKENS, HiddenStateReader, load_reader, states_of
from peagle.drafter.store import FeatureSpec, StoreWriter
from peagle.errors import CapacityError, InputError
from peagle.files import sha256

SHARD_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureJob:
    """What is to be stored where.

    Attributes:
        target: folder of the target.
        samples: documents in an order that does not change between attempts.
        spec: of the target and the samples; a store with another one is refused.
        folder: the store.
        device: for the target.
    """

    target: Path
    samples: Sequence[Sample]
    spec: FeatureSpec
    folder: Path
    device: str


def target_fingerprint(target: Path) -> str:
    """SHA-256 over the target's config.json and weight files.

    Raises:
        InputError: no target there.
    """
    files = [target / "config.json", *sorted(target.glob("*.safetensors"))]
    if not files[0].is_file() or len(files) == 1:
        raise InputError(f"{target}: no config.json with safetensors weights")
    return _digest(sha256(file).encode() for file in files)


def samples_fingerprint(samples: Sequence[Sample]) -> str:
    """SHA-256 over the documents, in order."""
    return _digest(json.dumps([sample.token_ids, sample.num_prompt_tokens]).encode() for sample in samples)


def plan_shards(samples: Sequence[Sample], shard_tokens: int = SHARD_TOKENS) -> list[range]:
    """Cut the samples into consecutive ranges of about `shard_tokens` tokens."""
    shards: list[range] = []
    start = num_tokens = 0
    for index, sample in enumerate(samples):
        num_tokens += len(sample.token_ids)
        if num_tokens >= shard_tokens:
            shards.append(range(start, index + 1))
            start, num_tokens = index + 1, 0
    if start < len(samples):
        shards.append(range(start, len(samples)))
    return shards


def open_store(
    samples: Sequence[Sample], spec: FeatureSpec, folder: Path
) -> tuple[StoreWriter, dict[int, list[Sample]]]:
    """The store as far as it is there, and the shards that are missing by their numbers.

    Raises:
        ConfigError: the store holds the features of something else.
        CapacityError: the disk cannot hold what is left to be written.
    """
    shards = plan_shards(samples)
    writer = StoreWriter(folder, spec, num_shards=len(shards))
    missing = {number: [samples[i] for i in shard] for number, shard in enumerate(shards) if not writer.has(number)}
    if missing:
        writer.clear()
        _check_disk(folder, sum(len(sample.token_ids) for shard in missing.values() for sample in shard), spec)
    return writer, missing


def extract(job: FeatureJob, progress: Callable[[int, int], None]) -> None:
    """Do `job` in this process; see `extract_features`."""
    extract_features(
        job.samples,
        lambda: load_reader(job.target, job.spec.aux_layers, job.device),
        job.spec,
        job.folder,
        device=job.device,
        progress=progress,
    )


def extract_features(
    samples: Sequence[Sample],
    load_reader: Callable[[], HiddenStateReader],
    spec: FeatureSpec,
    store: Path,
    *,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill `store` with the states of all samples; shards that are there already stay.

    Args:
        samples: documents in an order that does not change between attempts.
        load_reader: loads the target; not called when nothing is missing.
        spec: of the target and the samples; a store with another one is refused.
        store: folder to write.
        device: of the target.
        batch_tokens: padded tokens the target sees at once.
        progress: called with (shards done, shards in all) after each.

    Raises:
        ConfigError: the store holds the features of something else.
        CapacityError: the disk cannot hold what is left to be written.
    """
    writer, missing = open_store(samples, spec, store)
    reader = load_reader() if missing else None
    for number, shard in missing.items():
        assert reader is not None
        writer.add(number, shard_tensors(shard, reader, device=device, batch_tokens=batch_tokens))
        progress(writer.num_written, writer.num_shards)


def shard_tensors(
    samples: Sequence[Sample],
    reader: HiddenStateReader,
    *,
    device: torch.device | str,
    batch_tokens: int = BATCH_TOKENS,
) -> dict[str, torch.Tensor]:
    """What a shard holds of its samples."""
    states = states_of(samples, reader, device=device, batch_tokens=batch_tokens)
    return {
        "token_ids": torch.tensor([t for s in samples for t in s.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(s.token_ids) for s in samples]),
        "num_prompt_tokens": torch.tensor([s.num_prompt_tokens for s in samples]),
        "aux": torch.cat([aux for aux, _ in states]),
        "last": torch.cat([last for _, last in states]),
    }


def _check_disk(store: Path, num_tokens: int, spec: FeatureSpec) -> None:
    needed, free = num_tokens * (spec.bytes_per_token + 4), shutil.disk_usage(store).free
    if needed > free:
        raise CapacityError(
            f"{store}: {num_tokens:,} tokens at {spec.bytes_per_token:,} bytes each need {needed / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are free",
            hint="free some, name a larger disk with --features, or store nothing: --on-the-fly",
        )


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
