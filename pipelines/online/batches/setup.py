"""From the endpoint's configuration to that of its batches: the same engines, beside its own."""

from collections.abc import Mapping

from peagle.catalog.engines import EngineKeys
from peagle.economics.price_keys import PriceKeys
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware
from pipelines.batch.config import StandInKeys
from pipelines.batch.placing import Neighbours, Placement
from pipelines.batch.pool import EngineRange
from pipelines.online.batches.settings import MIB, BatchSettings, Recipe, Shares
from pipelines.online.config import ServeConfig
from pipelines.online.gate import GateSettings

_ENVELOPE_BYTES = 4096  # what a line of a batch has around its body
_ENGINE_KEYS = {*EngineKeys.model_fields, *StandInKeys.model_fields}


def num_engines(config: ServeConfig) -> tuple[int, int]:
    """Engines of all batches that may run at once: at least, and at most."""
    if config.batches is None:
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
    """What the batches are built from; None where there are none.

    Args:
        placements: what an engine takes, by the model's name, with those of batches counted in.
        specs: of the endpoint's engines, by the model's name.
        app_id: under which the endpoint's engines number their places on a node.
    """
    if config.batches is None:
        return None
    models = {model.name: model for model in gate.models}
    shared = {
        **config.model_dump(mode="json", include=set(PriceKeys.model_fields)),
        "engines": config.batch_engines,
        "heartbeat_s": config.heartbeat_s,
    }
    return BatchSettings(
        folder=str(config.batches),
        recipes={
            keys.served_name: Recipe(
                model=models[keys.served_name],
                config={**keys.model_dump(mode="json", include=_ENGINE_KEYS), **shared},
                neighbours=Neighbours(places=app_id, hardware=hardware, placement=placements[keys.served_name]),
                commits=specs[keys.served_name].commits,
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
        shares=Shares(
            max_stored_mib=config.max_stored_mib,
            max_stored_files=config.max_stored_files,
            max_unfinished_batches=config.max_unfinished_batches,
        ),
    )
