"""The target's hidden states (features), stored or computed on the fly.

The features of a token are the concatenated states BEFORE the aux layers (vLLM's `aux_hidden_state_layers`, by
default 2, L/2, L-1 of L layers), and the state BEFORE the final norm, from which the target's distribution is computed.

A store consists of safetensors shards and an index. Each shard covers a fixed range of the samples. A worker computes
and writes a shard; then the main process adds the shard and its checksum to the index. So an interrupted extraction can
be resumed, and shards can be computed on any machine and in any order.

Shapes: T tokens of a document, H hidden size, A aux layers, B documents of a batch.
"""
# ruff: noqa: N815 - the names of tensors end with their shape, in capitals

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.data import Sample
from peagle.drafter.target import auto_class_of, require_layers
from peagle.errors import CapacityError, ConfigError, InputError, PeagleError
from peagle.files import converted_write_errors, sha256, write_json

INDEX = "index.json"
_PARTIAL = ".partial"
_DISK_FULL_HINT = "free some space, or use --on-the-fly"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    target: str  # fingerprint of the target
    aux_layers: tuple[int, ...]
    hidden_size: int
    samples: str  # fingerprint of the samples

    @property
    def bytes_per_token(self) -> int:
        return (len(self.aux_layers) + 1) * self.hidden_size * 2  # bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The tokens of one sample and their states."""

    token_ids_T: torch.Tensor  # int64
    loss_mask_T: torch.Tensor  # bool, True for the response
    aux_TAH: torch.Tensor  # [T, A * H], states before the aux layers
    last_TH: torch.Tensor  # [T, H], state before the final norm


def write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> str:
    """Write a shard atomically and return its checksum. The last of several writers wins."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = folder / _shard_name(number)
    partial = file.with_suffix(f".{uuid.uuid4().hex}{_PARTIAL}")
    with converted_write_errors(file, SafetensorError, hint=_DISK_FULL_HINT):
        try:
            save_file(tensors, partial)
            checksum = sha256(partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return checksum


class StoreWriter:
    def __init__(self, folder: Path, spec: FeatureSpec, *, num_shards: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._index: dict[str, Any] = {
            "spec": asdict(spec),
            "bytes_per_token": spec.bytes_per_token,
            "num_shards": num_shards,
            "shards": {},
        }
        if (folder / INDEX).is_file():
            self._index = json.loads((folder / INDEX).read_text())
            stored = _spec_from(self._index["spec"])
            if differing := [name for name in asdict(spec) if getattr(stored, name) != getattr(spec, name)]:
                raise ConfigError(
                    f"{folder}: its features differ in {', '.join(differing)}",
                    hint="use another folder, or delete this one",
                )
        # Users delete a damaged shard to extract it again, so ignore entries without a file.
        self._index["shards"] = {
            name: checksum for name, checksum in self._index["shards"].items() if (folder / name).is_file()
        }

    @property
    def num_shards(self) -> int:
        return int(self._index["num_shards"])

    @property
    def num_written(self) -> int:
        return len(self._index["shards"])

    def has(self, number: int) -> bool:
        return _shard_name(number) in self._index["shards"]

    def add(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        self._add_to_index(_shard_name(number), write_shard(self._folder, number, tensors))

    def add_written(self, number: int, checksum: str) -> None:
        """Add a shard that another process has written."""
        file = self._folder / _shard_name(number)
        if not file.is_file() or sha256(file) != checksum:
            raise PeagleError(
                f"{file}: missing or different from the file that a worker wrote",
                hint="every node must have access to this folder at the same path",
            )
        self._add_to_index(file.name, checksum)

    def remove_partial_files(self) -> None:
        """Delete files left by killed writers. Call it only while no process writes."""
        for leftover in self._folder.glob(f"*{_PARTIAL}"):
            leftover.unlink(missing_ok=True)

    def _add_to_index(self, shard: str, checksum: str) -> None:
        shards = {**self._index["shards"], shard: checksum}
        self._index["shards"] = dict(sorted(shards.items()))
        with converted_write_errors(self._folder / INDEX, hint=_DISK_FULL_HINT):
            write_json(self._folder / INDEX, self._index)


class FeatureStore:
    tokens_ahead = 0  # number of tokens to read ahead; nothing has to be computed here

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        from safetensors.torch import load_file

        if not (folder / INDEX).is_file():
            raise InputError(f"{folder}: no features found", hint="extract them first")
        index = json.loads((folder / INDEX).read_text())
        if len(index["shards"]) != index["num_shards"]:
            progress = f"{len(index['shards'])} of {index['num_shards']} shards"
            raise InputError(
                f"{folder}: the extraction is not finished ({progress})", hint="repeat the command to resume it"
            )
        self.spec = _spec_from(index["spec"])
        self._shards = []
        for name in sorted(index["shards"]):
            file = folder / name
            if not file.is_file():
                raise InputError(f"{file}: not found", hint="repeat the command to extract the shard again")
            if verify and sha256(file) != index["shards"][name]:
                raise InputError(
                    f"{file}: does not match its checksum", hint="delete it and repeat the command to extract it again"
                )
            self._shards.append(load_file(file))
        # Of each document: the number of its shard, and its position in the shard.
        self._locations = [(n, i) for n, shard in enumerate(self._shards) for i in range(len(shard["lengths"]))]
        self._starts = [shard["lengths"].cumsum(0) - shard["lengths"] for shard in self._shards]

    def __len__(self) -> int:
        return len(self._locations)

    def num_tokens(self, index: int) -> int:
        number, position = self._locations[index]
        return int(self._shards[number]["lengths"][position])

    def __getitem__(self, index: int) -> Document:
        number, position = self._locations[index]
        shard, start = self._shards[number], int(self._starts[number][position])
        tokens = slice(start, start + int(shard["lengths"][position]))
        token_ids = shard["token_ids"][tokens].long()
        return Document(
            token_ids_T=token_ids,
            loss_mask_T=torch.arange(len(token_ids)) >= shard["num_prompt_tokens"][position],
            aux_TAH=shard["aux"][tokens],
            last_TH=shard["last"][tokens],
        )

    def read_ahead(self, indices: Sequence[int]) -> None:
        pass

    def documents(self, indices: Sequence[int]) -> list[Document]:
        return [self[index] for index in indices]


def _spec_from(raw: dict[str, Any]) -> FeatureSpec:
    return FeatureSpec(**{**raw, "aux_layers": tuple(raw["aux_layers"])})


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


BATCH_TOKENS = 4096
GPU_BATCH_TOKENS = 16_384  # with smaller batches, a GPU would wait for Python


class HiddenStateReader:
    """Reads the inputs of the target's aux layers and final norm."""

    def __init__(self, target: Any, aux_layers: Sequence[int]) -> None:
        self._decoder = target.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None or getattr(self._decoder, "norm", None) is None:
            raise ConfigError(f"{type(target).__name__}: no decoder with 'layers' and 'norm' to read states from")
        require_layers(aux_layers, len(layers))
        self._modules = [*(layers[layer] for layer in aux_layers), self._decoder.norm]

    @torch.inference_mode()
    def read(self, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the aux [B, T, A * H] and last [B, T, H] states of right-padded documents.

        Attention is causal, so padding does not change the states.
        """
        inputs: list[torch.Tensor] = []

        def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])

        hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in self._modules]
        try:
            self._decoder(input_ids=token_ids_BT, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(inputs[:-1], dim=-1), inputs[-1]


def load_reader(target: Path, aux_layers: Sequence[int], device: torch.device | str) -> HiddenStateReader:
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command has its own progress bar
    auto_class = auto_class_of(AutoConfig.from_pretrained(target, trust_remote_code=False))
    model = auto_class.from_pretrained(target, dtype=torch.bfloat16, trust_remote_code=False).to(device).eval()
    return HiddenStateReader(model, aux_layers)


def compute_states(
    samples: Sequence[Sample],
    reader: HiddenStateReader,
    *,
    device: torch.device | str,
    batch_tokens: int = BATCH_TOKENS,
    to: torch.device | str = "cpu",
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the aux [T, A * H] and last [T, H] states of each sample, in bf16, on the device `to`.

    The last bits of a state may depend on the batch, as in every engine.
    """
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in _batches_by_length(samples, batch_tokens):
        width = max(len(samples[i].token_ids) for i in batch)
        padded = [list(samples[i].token_ids) + [0] * (width - len(samples[i].token_ids)) for i in batch]
        aux, last = reader.read(torch.tensor(padded, device=device))
        for row, i in enumerate(batch):
            length = len(samples[i].token_ids)
            aux_TAH, last_TH = (state[row, :length].to(to, torch.bfloat16, copy=True) for state in (aux, last))
            states[i] = aux_TAH, last_TH
    return [states[i] for i in range(len(samples))]


def _batches_by_length(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of samples of similar length, to minimise padding. A batch is a list of sample indices."""
    batch: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids)):
        if batch and (len(batch) + 1) * len(samples[index].token_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


SHARD_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureJob:
    target: Path
    samples: Sequence[Sample]
    spec: FeatureSpec
    folder: Path
    device: str


def target_fingerprint(target: Path) -> str:
    """Return the SHA-256 of the target's config.json and weight files."""
    files = [target / "config.json", *sorted(target.glob("*.safetensors"))]
    if not files[0].is_file() or len(files) == 1:
        raise InputError(f"{target}: must have a config.json and safetensors weights")
    return _digest(sha256(file).encode() for file in files)


def samples_fingerprint(samples: Sequence[Sample]) -> str:
    return _digest(json.dumps([sample.token_ids, sample.num_prompt_tokens]).encode() for sample in samples)


def plan_shards(samples: Sequence[Sample], shard_tokens: int = SHARD_TOKENS) -> list[range]:
    """Cut the samples into consecutive ranges of at least `shard_tokens` tokens; the last may be shorter."""
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
    """Open or create a store; return its writer, and the samples of the missing shards by shard number."""
    shards = plan_shards(samples)
    writer = StoreWriter(folder, spec, num_shards=len(shards))
    missing = {number: [samples[i] for i in shard] for number, shard in enumerate(shards) if not writer.has(number)}
    if missing:
        writer.remove_partial_files()
        num_tokens = sum(len(sample.token_ids) for shard in missing.values() for sample in shard)
        needed_bytes = num_tokens * (spec.bytes_per_token + 4)  # a token id has four bytes
        free_bytes = shutil.disk_usage(folder).free
        if needed_bytes > free_bytes:
            raise CapacityError(
                f"{folder}: {num_tokens:,} tokens at {spec.bytes_per_token:,} bytes each need "
                f"{needed_bytes / 2**30:.1f} GiB, but only {free_bytes / 2**30:.1f} GiB are free",
                hint="free some space, set --features to a folder on a larger disk, or use --on-the-fly",
            )
    return writer, missing


def extract_here(job: FeatureJob, progress: Callable[[int, int], None]) -> None:
    """Extract the features of a job in this process."""
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
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    writer, missing = open_store(samples, spec, folder)
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
    states = compute_states(samples, reader, device=device, batch_tokens=batch_tokens)
    return {
        "token_ids": torch.tensor([t for s in samples for t in s.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(s.token_ids) for s in samples]),
        "num_prompt_tokens": torch.tensor([s.num_prompt_tokens for s in samples]),
        "aux": torch.cat([aux for aux, _ in states]),
        "last": torch.cat([last for _, last in states]),
    }


def _digest(parts: Iterable[bytes]) -> str:
    combined = hashlib.sha256()
    for part in parts:
        combined.update(hashlib.sha256(part).digest())
    return combined.hexdigest()


class ComputedFeatures:
    """The features of `samples`, computed on demand. Only the documents of the latest `read_ahead` call are cached."""

    def __init__(
        self,
        samples: Sequence[Sample],
        load_reader: Callable[[], HiddenStateReader],
        spec: FeatureSpec,
        *,
        device: torch.device | str = "cpu",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.spec, self.tokens_ahead = spec, batch_tokens
        self._samples, self._load_reader, self._device = samples, load_reader, torch.device(device)
        self._cached: dict[int, Document] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def num_tokens(self, index: int) -> int:
        return len(self._samples[index].token_ids)

    def read_ahead(self, indices: Sequence[int]) -> None:
        self._cached = self._compute(list(dict.fromkeys(indices)))

    def documents(self, indices: Sequence[int]) -> list[Document]:
        """Return documents. Documents that were not read ahead are computed now."""
        documents = self._cached | self._compute([index for index in indices if index not in self._cached])
        return [documents[index] for index in indices]

    def _compute(self, indices: Sequence[int]) -> dict[int, Document]:
        samples = [self._samples[index] for index in indices]
        with torch.autocast(self._device.type, enabled=False):  # autocast would change the target's states
            states = compute_states(
                samples, self._reader, device=self._device, batch_tokens=self.tokens_ahead, to=self._device
            )
        return {
            index: Document(
                token_ids_T=torch.tensor(sample.token_ids),
                loss_mask_T=torch.tensor(sample.loss_mask),
                aux_TAH=aux,
                last_TH=last,
            )
            for index, sample, (aux, last) in zip(indices, samples, states, strict=True)
        }

    @cached_property
    def _reader(self) -> HiddenStateReader:
        return self._load_reader()


Features = FeatureStore | ComputedFeatures
