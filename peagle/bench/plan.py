"""From what a user asked for to what will be measured: target, engines, prices. Starts nothing.

Everything that can be refused is refused here, in `setups` or in `peagle.measurement.dataset`, before an engine starts.
"""

from dataclasses import dataclass, replace
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.schedule import Pass, all_passes
from peagle.bench.setups import Setup, make_setups
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_keys import PRICE_KEYS, require_device, resolve_price
from peagle.economics.prices import Price
from peagle.engine.arguments import check_slots
from peagle.engine.memory import check_capacity
from peagle.engine.precision import Precision
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.errors import PriceError
from peagle.hardware import Hardware
from peagle.measurement.dataset import Dataset
from peagle.measurement.target import target_fingerprint, target_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be measured.

    Attributes:
        spec: the engine without a drafter; each setup adds its own.
        setups: the engines.
        price: of this hardware; None where none is known and none was stated.
        notes: what the user should know beforehand.
    """

    config: BenchConfig
    hardware: Hardware
    model: ResolvedModel
    spec: EngineSpec
    precision: Precision
    setups: list[Setup]
    price: Price | None
    notes: list[str]

    @property
    def passes(self) -> list[Pass]:
        """Every pass in its order."""
        config = self.config
        return all_passes(self.setups, config.concurrency, config.repeats, config.rounds)

    @property
    def usd_per_s(self) -> float | None:
        """What the devices of one engine cost, by the arithmetic of the ledger; None where no price is known."""
        on_gpu = self.hardware.platform == "cuda"
        num_devices = self.spec.num_accelerators if on_gpu else self.hardware.num_cpus
        return num_devices * self.price.usd_per_device_s if self.price else None

    def engine_spec(self, setup: Setup) -> EngineSpec:
        """The engine of one setup."""
        return replace(self.spec, drafter=setup.drafter)

    def fingerprint(self, dataset: Dataset) -> dict[str, Any]:
        """What all passes of a folder share; JSON-ready. Methods, K, concurrencies and repeats can be added to it."""
        shared = target_fingerprint(self.config, self.model, self.spec, self.precision, self.hardware, dataset)
        own = {
            "requests_per_slot": self.config.requests_per_slot,
            "load_format": self.spec.load_format,
            # The rates are each engine's own, as heads are. Folders without any have always held an empty list.
            "synthetic_acceptance": "by lot" if self.config.synthetic_acceptance else [],
            "max_num_seqs": self.spec.max_num_seqs,
            "max_cudagraph_capture_size": self.config.max_cudagraph_capture_size,
        }
        # Named only where it was asked for, so that folders from before there was the key go on.
        slots = self.config.max_num_batched_tokens
        return shared | own | ({"max_num_batched_tokens": slots} if slots else {})


def make_plan(config: BenchConfig, hardware: Hardware, model: ResolvedModel) -> Plan:
    """Decide everything but the prompts.

    Raises:
        ConfigError: of the kind that fits (drafter, precision, context, token slots, price).
        CapacityError: the hardware cannot hold an engine.
    """
    setups, notes = make_setups(config, model, hardware)
    price, no_price = _price(config, hardware)
    capture_size = config.max_cudagraph_capture_size
    spec = target_spec(
        config,
        model,
        max_num_seqs=config.max_num_seqs or max(config.concurrency),
        kv_cache_precision=config.kv_cache_precision,
        load_format=config.load_format,
        max_num_batched_tokens=config.max_num_batched_tokens,
        extra={"max_cudagraph_capture_size": capture_size} if capture_size else {},
        # A prompt is asked again by every repeat and concurrency: from the cache it would cost no prefill.
        enable_prefix_caching=False,
    )
    plan = Plan(
        config=config,
        hardware=hardware,
        model=model,
        spec=spec,
        precision=spec_precision(spec, hardware),
        setups=setups,
        price=price,
        notes=notes + no_price,
    )
    for setup in setups:
        check_slots(plan.engine_spec(setup))
        check_capacity(plan.engine_spec(setup), hardware)
    return plan


def _price(config: BenchConfig, hardware: Hardware) -> tuple[Price | None, list[str]]:
    """The price, or why there is none: speeds can be measured without one, unless the user speaks of it."""
    try:
        price = resolve_price(config, hardware)
    except PriceError as error:
        if any(name in config.model_fields_set for name in PRICE_KEYS):
            raise
        return None, [f"tokens per dollar are left out: {error.message} ({error.hint})"]
    require_device(price, "accelerator" if hardware.platform == "cuda" else "vcpu", "engines here")
    return price, []
