"""The target's hidden states, computed once and stored: what the head reads, and what it is measured against.

For each token: the states ENTERING the aux layers (vLLM's `aux_hidden_state_layers`, the paper's 2, L/2, L-1), side by
side, and the state ENTERING the final norm, from which the target's own distribution follows. Each shard covers a
fixed range of the samples, so an interrupted extraction goes on where it stopped. This file knows targets of
transformers; how shards lie on the disk is store.py's.

Shapes: T tokens of a shard or document, H hidden size, A aux layers, B documents of a batch.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.data import Sample
from peagle.drafter.store import FeatureSpec, StoreWriter
from peagle.errors import CapacityError, ConfigError, InputError
from peagle.files import sha256

SHARD_TOKENS = 16_384


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


class HiddenStateReader:
    """A target with hooks on the inputs of its aux layers and of its final norm.

    Raises:
        ConfigError: the target has no such layers.
    """

    def __init__(self, target: Any, aux_layers: Sequence[int]) -> None:
        self._decoder = target.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None or getattr(self._decoder, "norm", None) is None:
            raise ConfigError(f"{type(target).__name__}: no decoder with 'layers' and 'norm' to read states from")
        beyond = [layer for layer in aux_layers if not 0 <= layer < len(layers)]
        if beyond:
            raise ConfigError(f"aux layers {beyond}: the target has layers 0 to {len(layers) - 1}")
        self._modules = [*(layers[layer] for layer in aux_layers), self._decoder.norm]

    @torch.inference_mode()
    def read(self, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States of right-padded documents: aux [B, T, A * H] and last [B, T, H].

        Attention is causal, so what stands right of a document does not change it.
        """
        seen: list[torch.Tensor] = []
        hooks = [module.register_forward_pre_hook(_keeper(seen), with_kwargs=True) for module in self._modules]
        try:
            self._decoder(input_ids=token_ids_BT, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(seen[:-1], dim=-1), seen[-1]


def _keeper(seen: list[torch.Tensor]) -> Callable[..., None]:
    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    return keep


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


def extract_features(
    samples: Sequence[Sample],
    load_reader: Callable[[], HiddenStateReader],
    spec: FeatureSpec,
    store: Path,
    *,
    device: torch.device | str = "cpu",
    batch_tokens: int = 4096,
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
    shards = plan_shards(samples)
    writer = StoreWriter(store, spec, num_shards=len(shards))
    missing = [number for number in range(len(shards)) if not writer.has(number)]
    _check_disk(store, sum(len(samples[i].token_ids) for number in missing for i in shards[number]), spec)
    reader = load_reader() if missing else None
    for number in missing:
        assert reader is not None
        writer.add(number, _extract_shard([samples[i] for i in shards[number]], reader, device, batch_tokens))
        progress(writer.num_written, len(shards))


def _extract_shard(
    samples: list[Sample], reader: HiddenStateReader, device: torch.device | str, batch_tokens: int
) -> dict[str, torch.Tensor]:
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in _batches_by_length(samples, batch_tokens):
        width = max(len(samples[i].token_ids) for i in batch)
        padded = [list(samples[i].token_ids) + [0] * (width - len(samples[i].token_ids)) for i in batch]
        aux, last = reader.read(torch.tensor(padded, device=device))
        for row, i in enumerate(batch):
            length = len(samples[i].token_ids)
            states[i] = (_compact(aux[row, :length]), _compact(last[row, :length]))
    ordered = [states[i] for i in range(len(samples))]
    return {
        "token_ids": torch.tensor([t for s in samples for t in s.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(s.token_ids) for s in samples]),
        "num_prompt_tokens": torch.tensor([s.num_prompt_tokens for s in samples]),
        "aux": torch.cat([aux for aux, _ in ordered]),
        "last": torch.cat([last for _, last in ordered]),
    }


def _compact(states: torch.Tensor) -> torch.Tensor:
    return states.to("cpu", torch.bfloat16, copy=True)


def _batches_by_length(samples: list[Sample], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of documents of like length, so that little is padding."""
    batch: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids)):
        if batch and (len(batch) + 1) * len(samples[index].token_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _check_disk(store: Path, num_tokens: int, spec: FeatureSpec) -> None:
    needed, free = num_tokens * (spec.bytes_per_token + 4), shutil.disk_usage(store).free
    if needed > free:
        raise CapacityError(
            f"{store}: {num_tokens:,} tokens at {spec.bytes_per_token:,} bytes each need {needed / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are free",
            hint="free some, give another directory, or use fewer responses",
        )


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
