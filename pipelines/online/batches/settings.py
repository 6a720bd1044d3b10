"""What the endpoint's batches are built from, wherever the ingress lands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.batch.placing import Neighbours
from pipelines.online.requests import ServedModel

MIB = 1 << 20


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
        max_downloads_bytes, max_downloads_bytes_of_key: of files, under way at once.
        presigns: the store gives files to clients itself, where it is S3.
    """

    folder: str
    recipes: Mapping[str, Recipe]
    at_once: int
    max_output_tokens: int | None
    ledger: Path
    max_downloads_bytes: int = 256 * MIB
    max_downloads_bytes_of_key: int = 32 * MIB
    presigns: bool = True
