"""Settings of the endpoint's batches, derived from the endpoint's configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.economics.price_options import PriceOptions
from peagle.economics.tags import TagOptions
from peagle.engine.response_parser import PARSER_KEYS
from peagle.engine.spec import EngineSpec
from peagle.engine_options import EngineOptions
from peagle.hardware import Hardware
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import FakeEngineOptions
from pipelines.cluster.placement import Neighbours, Placement
from pipelines.online.config import ServeConfig, ServedModelOptions
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import GateSettings
from pipelines.online.gateway.keys import KeyRecord

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuota:
    max_stored_mib: int = 10 * 1024
    max_stored_files: int = 2000
    max_unfinished_batches: int = 20

    def for_key(self, key: KeyRecord) -> "KeyQuota":
        """Return the limits of this key: its own, or these defaults."""
        key_limits = {name: getattr(key, name) for name in self.__slots__}
        return replace(self, **{name: value for name, value in key_limits.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchModel:
    """The options of the batches of one model."""

    model: ServedModel
    config: Mapping[str, Any]  # configuration of the bulk run: engine, price and number of engines, as for the endpoint
    neighbours: Neighbours  # engines of the endpoint and of other batches on these nodes
    # commits of the models that the endpoint's engines loaded, by hub id
    commits: Mapping[str, str] = field(default_factory=dict)
    # slots of all the endpoint's engines, if batches use idle slots; 0 if batches have their own engines
    lent_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The folder and limits of batches."""

    folder: str  # shared by all nodes, or `s3://`
    models: Mapping[str, BatchModel]  # by served name
    max_concurrent: int  # maximum number of batches with their own engines at the same time
    max_output_tokens: int | None
    ledger: Path
    # max_transfers_bytes, max_transfers_bytes_of_key: limits of concurrent uploads and downloads together
    max_transfers_bytes: int = 256 * MIB
    max_transfers_bytes_of_key: int = 32 * MIB
    presigns: bool = True  # whether clients download from S3 directly
    max_upload_bytes: int = 200 * MIB  # limit for a request that uploads a file
    max_line_bytes: int = MIB  # limit for one request in a file
    quota: KeyQuota = field(default_factory=KeyQuota)  # the default limits of keys
    cache_salt: Callable[[KeyRecord], str | None] = lambda key: None  # returns a key's salt for the endpoint's engines
    # application, deployments: Serve's names of the endpoint, and of its engines by model, if they lend slots
    application: str = ""
    deployments: Mapping[str, str] = field(default_factory=dict)

    @property
    def uses_idle_slots(self) -> bool:
        """Whether batches use idle slots of the endpoint's engines."""
        return any(batch_model.lent_slots for batch_model in self.models.values())

    def tags(self, model: str | None, key: KeyRecord) -> dict[str, str]:
        """Return the tags of a batch. The key's tags override the endpoint's."""
        batch_model = self.models.get(model or "")
        return {**(batch_model.config.get("tags", {}) if batch_model else {}), **key.tags}


_ENVELOPE_BYTES = 4096  # a batch line's fields other than the body


def _engine_option_names(options: ServedModelOptions) -> set[str]:
    """Return the options that a batch's engine shares with the endpoint's. A fake engine has no parsers."""
    names = {*EngineOptions.model_fields, *FakeEngineOptions.model_fields}
    return names.difference(PARSER_KEYS) if options.engine == "fake" else names


def batch_engine_range(config: ServeConfig) -> tuple[int, int]:
    """Return the minimum and maximum number of engines that all running batches start together."""
    if config.batches is None or config.uses_idle_slots:
        return 0, 0
    engine_range = EngineRange.parse(config.batch_engines)
    return config.batches_at_once * engine_range.smallest, config.batches_at_once * engine_range.largest


def batch_settings(
    config: ServeConfig,
    gate: GateSettings,
    hardware: Hardware,
    placements: Mapping[str, Placement],
    specs: Mapping[str, EngineSpec],
    app_id: str,
) -> BatchSettings | None:
    """Return the settings, or None if batches are disabled. Engines with the same `app_id` share a node's cores."""
    if config.batches is None:
        return None
    models = {model.name: model for model in gate.models}
    common_config = {
        **config.model_dump(mode="json", include={*PriceOptions.model_fields, *TagOptions.model_fields}),
        "engines": "1" if config.uses_idle_slots else config.batch_engines,
        "heartbeat_s": config.heartbeat_s,
    }
    slot_group = f"{app_id}-lent" if config.uses_idle_slots else app_id
    if config.uses_idle_slots:  # a batch's process needs little CPU: it forwards rows to the endpoint's engines
        placements = {name: replace(placement, num_cpus=0.05, num_gpus=0) for name, placement in placements.items()}
    return BatchSettings(
        folder=str(config.batches),
        models={
            options.served_name: BatchModel(
                model=models[options.served_name],
                config={**options.model_dump(mode="json", include=_engine_option_names(options)), **common_config},
                neighbours=Neighbours(
                    slot_group=slot_group, hardware=hardware, placement=placements[options.served_name]
                ),
                commits=specs[options.served_name].commits,
                lent_slots=specs[options.served_name].max_num_seqs * options.max_replicas
                if config.uses_idle_slots
                else 0,
            )
            for options in config.served
        },
        max_concurrent=config.batches_at_once,
        max_output_tokens=config.max_output_tokens,
        ledger=gate.ledger,
        max_transfers_bytes=config.max_transfers_mib * MIB,
        max_transfers_bytes_of_key=config.max_transfers_mib_per_key * MIB,
        presigns=config.presigned_downloads,
        max_upload_bytes=gate.max_upload_bytes,
        max_line_bytes=gate.max_body_bytes + _ENVELOPE_BYTES,
        quota=KeyQuota(
            max_stored_mib=config.max_stored_mib,
            max_stored_files=config.max_stored_files,
            max_unfinished_batches=config.max_unfinished_batches,
        ),
        cache_salt=gate.cache_salt,
    )
