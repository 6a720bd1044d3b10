"""What the endpoint's batches are built from, wherever the ingress lands."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.batch.placing import Neighbours
from pipelines.online.keys import KeyRecord
from pipelines.online.requests import ServedModel

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a key may have; each as its record says, or as all keys have it."""

    max_stored_mib: int = 10 * 1024
    max_stored_files: int = 2000
    max_unfinished_batches: int = 20

    def of(self, key: KeyRecord) -> "Shares":
        """What this key may have."""
        given = {name: getattr(key, name) for name in self.__slots__}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How batches of a model are run.

    Attributes:
        config: keys of a bulk run: engine, price and number of engines, the same that the endpoint has.
        neighbours: the endpoint's engines and those of other batches.
        commits: by hub id, what the endpoint's engines have loaded.
    """

    model: ServedModel
    config: Mapping[str, Any]
    neighbours: Neighbours
    commits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Where batches are kept, and what they may be.

    Attributes:
        folder: a folder that every node sees, or `s3://`.
        recipes: by the name that clients give the model.
        at_once: batches that have engines at the same time.
        ledger: of the endpoint.
        max_transfers_bytes, max_transfers_bytes_of_key: of files, under way at once, up and down.
        presigns: the store gives files to clients itself, where it is S3.
        max_upload_bytes: of a request that uploads a file.
        max_line_bytes: of a request in one.
        shares: what keys may have whose records do not say.
    """

    folder: str
    recipes: Mapping[str, Recipe]
    at_once: int
    max_output_tokens: int | None
    ledger: Path
    max_transfers_bytes: int = 256 * MIB
    max_transfers_bytes_of_key: int = 32 * MIB
    presigns: bool = True
    max_upload_bytes: int = 200 * MIB
    max_line_bytes: int = MIB
    shares: Shares = field(default_factory=Shares)
