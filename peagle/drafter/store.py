"""The feature store: safetensors shards and an index.

The process that computes a shard writes it; the single process that fills the store then adds it to the index, with its
checksum. Readers map shards into memory, so the page cache manages them.

Shapes: T tokens of a shard or document, H hidden size, A aux layers.
"""
# ruff: noqa: N815 - fields carry a shape suffix with capitals, as arguments do

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from peagle.errors import ConfigError, InputError, PeagleError
from peagle.files import sha256, write_json, writing

INDEX = "index.json"
_BYTES_PER_STATE = 2  # bfloat16
_PARTIAL = ".partial"
_FULL = "free some space, or use --on-the-fly"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """The source of stored states. Stores with equal specs are interchangeable.

    Attributes:
        target: fingerprint of the target's configuration and weights.
        aux_layers: indices of the layers whose inputs are stored, ascending.
        samples: fingerprint of the documents.
    """

    target: str
    aux_layers: tuple[int, ...]
    hidden_size: int
    samples: str

    @property
    def bytes_per_token(self) -> int:
        return (len(self.aux_layers) + 1) * self.hidden_size * _BYTES_PER_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The states of one sample.

    Attributes:
        token_ids_T: int64.
        loss_mask_T: bool, True for the response.
        aux_TAH: [T, A * H], states before the aux layers.
        last_TH: [T, H], state before the final norm.
    """

    token_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    aux_TAH: torch.Tensor
    last_TH: torch.Tensor


class Features(Protocol):
    """Documents with their states, stored or computed.

    Attributes:
        tokens_ahead: number of tokens to read ahead; 0 if there is no benefit.
    """

    spec: FeatureSpec
    tokens_ahead: int

    def __len__(self) -> int:
        """Return the number of documents."""

    def num_tokens(self, index: int) -> int:
        """Return the length of a document."""

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Prepare documents that will be requested soon."""

    def documents(self, indices: Sequence[int]) -> list[Document]:
        """Return documents by index."""


def write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> str:
    """Write a shard atomically and return its checksum. The last of several writers wins."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = folder / _shard_name(number)
    partial = file.with_suffix(f".{uuid.uuid4().hex}{_PARTIAL}")
    with writing(file, SafetensorError, hint=_FULL):
        try:
            save_file(tensors, partial)
            checksum = sha256(partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return checksum


class StoreWriter:
    """An unfinished store.

    Args:
        folder: created if missing.
        num_shards: number of shards of the finished store.
    """

    def __init__(self, folder: Path, spec: FeatureSpec, *, num_shards: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._index = _open_index(folder, spec, num_shards)
        # A damaged shard is repaired by deleting its file, so ignore entries without a file.
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
        """Write a shard and add it to the index."""
        self._add_to_index(_shard_name(number), write_shard(self._folder, number, tensors))

    def take(self, number: int, checksum: str) -> None:
        """Add a shard to the index that another process has written."""
        file = self._folder / _shard_name(number)
        if not file.is_file() or sha256(file) != checksum:
            raise PeagleError(
                f"{file}: missing or different from the file that a worker wrote",
                hint="every node must have access to this folder at the same path",
            )
        self._add_to_index(file.name, checksum)

    def clear(self) -> None:
        """Delete files left by killed writers. Call it only while no process writes."""
        for leftover in self._folder.glob(f"*{_PARTIAL}"):
            leftover.unlink(missing_ok=True)

    def _add_to_index(self, shard: str, checksum: str) -> None:
        shards = {**self._index["shards"], shard: checksum}
        self._index["shards"] = dict(sorted(shards.items()))
        with writing(self._folder / INDEX, hint=_FULL):
            write_json(self._folder / INDEX, self._index)


class FeatureStore:
    """A finished store.

    Args:
        folder: filled by `extract_features`.
        verify: compare every shard with its checksum.
    """

    tokens_ahead = 0

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        if not (folder / INDEX).is_file():
            raise InputError(f"{folder}: no features found", hint="extract them first")
        index = json.loads((folder / INDEX).read_text())
        if len(index["shards"]) != index["num_shards"]:
            done = f"{len(index['shards'])} of {index['num_shards']} shards"
            raise InputError(
                f"{folder}: the extraction is not finished ({done})", hint="repeat the command to resume it"
            )
        self.spec = _spec_from(index["spec"])
        self._shards = []
        for name in sorted(index["shards"]):
            file = folder / name
            if not file.is_file():
                raise InputError(f"{file}: not found", hint="repeat the command to extract it again")
            if verify and sha256(file) != index["shards"][name]:
                raise InputError(
                    f"{file}: does not match its checksum", hint="delete it and repeat the command to extract it again"
                )
            self._shards.append(_load(file))
        self._places = [(s, i) for s, shard in enumerate(self._shards) for i in range(len(shard["lengths"]))]
        self._starts = [shard["lengths"].cumsum(0) - shard["lengths"] for shard in self._shards]

    def __len__(self) -> int:
        return len(self._places)

    def num_tokens(self, index: int) -> int:
        shard, place = self._places[index]
        return int(self._shards[shard]["lengths"][place])

    def __getitem__(self, index: int) -> Document:
        number, place = self._places[index]
        shard, start = self._shards[number], int(self._starts[number][place])
        tokens = slice(start, start + int(shard["lengths"][place]))
        token_ids = shard["token_ids"][tokens].long()
        return Document(
            token_ids_T=token_ids,
            loss_mask_T=torch.arange(len(token_ids)) >= shard["num_prompt_tokens"][place],
            aux_TAH=shard["aux"][tokens],
            last_TH=shard["last"][tokens],
        )

    def read_ahead(self, indices: Sequence[int]) -> None:
        pass

    def documents(self, indices: Sequence[int]) -> list[Document]:
        return [self[index] for index in indices]

    def response_token_ids(self) -> Iterator[int]:
        """Yield every token under the loss."""
        for index in range(len(self)):
            document = self[index]
            yield from document.token_ids_T[document.loss_mask_T].tolist()


def _open_index(store: Path, spec: FeatureSpec, num_shards: int) -> dict[str, Any]:
    file = store / INDEX
    if not file.is_file():
        return {
            "spec": asdict(spec),
            "bytes_per_token": spec.bytes_per_token,
            "num_shards": num_shards,
            "shards": {},
        }
    index: dict[str, Any] = json.loads(file.read_text())
    stored = _spec_from(index["spec"])
    if stored != spec:
        other = [name for name in asdict(spec) if getattr(stored, name) != getattr(spec, name)]
        raise ConfigError(
            f"{store}: has other features: {', '.join(other)} differ",
            hint="use another folder, or delete this one",
        )
    return index


def _spec_from(raw: dict[str, Any]) -> FeatureSpec:
    return FeatureSpec(**{**raw, "aux_layers": tuple(raw["aux_layers"])})


def _load(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(file))


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
