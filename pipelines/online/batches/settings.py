"""The settings of the endpoint's batches, wherever the ingress lands.

Made from the endpoint's configuration: the same engines, beside its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.economics.price_options import PriceOptions
from peagle.economics.tags import TagOptions
from peagle.engine.spec import EngineSpec
from peagle.engine_options import EngineKeys
from peagle.hardware import Hardware
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import StandInKeys
from pipelines.cluster.placement import Neighbours, Placement
from pipelines.online.config import ServeConfig
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import GateSettings
from pipelines.online.gateway.keys import KeyRecord

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShares:
    """Shares of a key: by its record, or as all keys have them."""

    max_stored_mib: int = 10 * 1024
    max_stored_files: int = 2000
    max_unfinished_batches: int = 20

    def of(self, key: KeyRecord) -> "KeyShares":
        """The shares of this key."""
        given = {name: getattr(key, name) for name in self.__slots__}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How batches of a model are run.

    Attributes:
        config: keys of a bulk run: engine, price and number of engines, the same that the endpoint has.
        neighbours: the endpoint's engines and those of other batches.
        commits: by hub id, what the endpoint's engines have loaded.
        lent_slots: of all the endpoint's engines, whose idle ones its batches have; 0 where they have engines of
            their own.
    """

    model: ServedModel
    config: Mapping[str, Any]
    neighbours: Neighbours
    commits: Mapping[str, str] = field(default_factory=dict)
    lent_slots: int = 0


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
        cache_salt: of a key, for the endpoint's engines.
        application: Serve's name of the endpoint, and `deployments` those of its engines by model, where they are lent.
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
    shares: KeyShares = field(default_factory=KeyShares)
    cache_salt: Callable[[KeyRecord], str | None] = lambda key: None
    application: str = ""
    deployments: Mapping[str, str] = field(default_factory=dict)

    @property
    def lends(self) -> bool:
        """Whether batches have the idle slots of the endpoint's engines."""
        return any(recipe.lent_slots for recipe in self.recipes.values())

    def tags(self, model: str | None, key: KeyRecord) -> dict[str, str]:
        """The tags of a batch: the endpoint's, and over them its key's."""
        recipe = self.recipes.get(model or "")
        return {**(recipe.config.get("tags", {}) if recipe else {}), **key.tags}


_LENT_CPUS = 0.05  # of a process that only asks the endpoint's engines; it must fit beside these
_ENVELOPE_BYTES = 4096  # what a line of a batch has around its body
_ENGINE_KEYS = {*EngineKeys.model_fields, *StandInKeys.model_fields}


def num_engines(config: ServeConfig) -> tuple[int, int]:
    """Engines of all batches that may run at once: at least, and at most."""
    if config.batches is None or config.lends_engines:
        return 0, 0
    each = EngineRange.parse(config.batch_engines)
    return config.batches_at_once * each.smallest, config.batches_at_once * each.largest


def batch_settings(
    config: ServeConfig,
    gate: GateSettings,
    hardware: Hardware,
    placements: Mapping[str, Placement],
    specs: Mapping[str, EngineSpec],
    app_id: str,
) -> BatchSettings | None:
    """The settings of the batches; None where there are none.

    Args:
        placements: what an engine takes, by the model's name, with those of batches counted in.
        specs: of the endpoint's engines, by the model's name.
        app_id: under which the endpoint's engines number their slots on a node.
    """
    if config.batches is None:
        return None
    models = {model.name: model for model in gate.models}
    shared = {
        **config.model_dump(mode="json", include={*PriceOptions.model_fields, *TagOptions.model_fields}),
        "engines": "1" if config.lends_engines else config.batch_engines,
        "heartbeat_s": config.heartbeat_s,
    }
    return BatchSettings(
        folder=str(config.batches),
        recipes={
            keys.served_name: Recipe(
                model=models[keys.served_name],
                config={**keys.model_dump(mode="json", include=_ENGINE_KEYS), **shared},
                neighbours=_neighbours(config, hardware, placements[keys.served_name], app_id),
                commits=specs[keys.served_name].commits,
                lent_slots=specs[keys.served_name].max_num_seqs * keys.max_replicas if config.lends_engines else 0,
            )
            for keys in config.served
        },
        at_once=config.batches_at_once,
        max_output_tokens=config.max_output_tokens,
        ledger=gate.ledger,
        max_transfers_bytes=config.max_transfers_mib * MIB,
        max_transfers_bytes_of_key=config.max_transfers_mib_per_key * MIB,
        presigns=config.presigned_downloads,
        max_upload_bytes=gate.max_upload_bytes,
        max_line_bytes=gate.max_body_bytes + _ENVELOPE_BYTES,
        shares=KeyShares(
            max_stored_mib=config.max_stored_mib,
            max_stored_files=config.max_stored_files,
            max_unfinished_batches=config.max_unfinished_batches,
        ),
        cache_salt=gate.cache_salt,
    )


def _neighbours(config: ServeConfig, hardware: Hardware, placement: Placement, app_id: str) -> Neighbours:
    """The engines beside a batch's own.

    Where they are lent, the batch's process takes no cores of theirs.
    """
    if not config.lends_engines:
        return Neighbours(slot_group=app_id, hardware=hardware, placement=placement)
    lent = replace(placement, num_cpus=_LENT_CPUS, num_gpus=0)
    return Neighbours(slot_group=f"{app_id}-lent", hardware=hardware, placement=lent)
