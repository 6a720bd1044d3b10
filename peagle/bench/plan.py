"""The plan of a measurement: target, engines, passes, price.

Configuration errors are raised here, in `setups` or in `prompts`, before an engine starts.

Repeats of a cell should be far apart, with other methods in between, so that a drift of the machine affects all
methods. But each start of an engine takes a minute or more. So the repeats are divided among rounds. Every round
starts each engine once, in alternating order (A B C, C B A), so that a steady drift affects all equally and the last
engine of a round keeps running.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.prompts import Dataset
from peagle.bench.setups import Setup, make_setups, require_capacity, target_spec
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_options import PRICE_OPTIONS, require_device, resolve_price
from peagle.economics.prices import Price
from peagle.engine.keys import stated
from peagle.engine.precision import Precision
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.errors import PriceError
from peagle.hardware import Hardware
from peagle.provenance import versions

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of the prompts through an engine at one concurrency."""

    setup: Setup
    concurrency: int
    repeat: int


def all_passes(setups: Sequence[Setup], concurrencies: Sequence[int], repeats: int, rounds: int) -> list[Pass]:
    """Return all passes in order. An engine runs all concurrencies of a repeat before the next repeat."""
    num_rounds = min(rounds, repeats)
    ordered = []
    for round_index in range(num_rounds):
        share = [repeat for repeat in range(repeats) if repeat % num_rounds == round_index]
        for setup in setups if round_index % 2 == 0 else reversed(setups):
            ordered += [Pass(setup=setup, concurrency=c, repeat=r) for r in share for c in concurrencies]
    return ordered


def num_starts(passes: Iterable[Pass]) -> int:
    return sum(1 for _ in groupby(passes, key=lambda one: one.setup))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The engines to measure, and what they share.

    Attributes:
        config: the benchmark, or the equivalent benchmark of another command.
        spec: the engine without a drafter.
        setups: the engines with their drafters.
        price: of this hardware; None if unknown.
        notes: information for the user.
        own: settings of this command that every pass depends on; JSON-ready.
        category_column: the column by which acceptance is grouped; None disables it.
    """

    config: BenchConfig
    hardware: Hardware
    model: ResolvedModel
    spec: EngineSpec
    precision: Precision
    setups: list[Setup]
    price: Price | None
    notes: list[str]
    own: Mapping[str, Any]
    category_column: str | None = None

    @property
    def passes(self) -> list[Pass]:
        config = self.config
        return all_passes(self.setups, config.concurrency, config.repeats, config.rounds)

    @property
    def usd_per_s(self) -> float | None:
        """The price of one engine's devices in USD per second; None if unknown."""
        return self.num_devices * self.price.usd_per_device_s if self.price else None

    @property
    def num_devices(self) -> int:
        on_gpu = self.hardware.platform == "cuda"
        return self.spec.num_accelerators if on_gpu else self.hardware.num_cpus

    def fingerprint(self, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that all passes of a folder share, as JSON-ready data.

        Methods, K, concurrencies and repeats are not included, so they can be added to a folder.
        """
        spec, runner = self.spec, chosen_model_runner()
        shared = {
            "model": {"name": self.model.name, "weights": self.model.fingerprint},
            "max_model_len": spec.max_model_len,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "enforce_eager": spec.enforce_eager,
            "kv_cache_gib": spec.kv_cache_gib,
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "sampling": self.config.sampling(),
            "dataset": dataset.identity(),
            "hardware": self.hardware.describe(),
            "versions": {name: version for name, version in versions().items() if name.startswith("vllm")},
            **stated(self.config),
        }
        # Included only if set, for compatibility with folders of earlier versions.
        return shared | ({MODEL_RUNNER: runner} if runner else {}) | dict(self.own)


def chosen_model_runner() -> str | None:
    """Return the user's setting of `VLLM_USE_V2_MODEL_RUNNER`; None lets vLLM choose the model runner."""
    return os.environ.get(MODEL_RUNNER) or None


def make_plan(config: BenchConfig, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
    capture_size, slots = config.max_cudagraph_capture_size, config.max_num_batched_tokens
    spec = target_spec(
        config,
        model,
        hardware,
        max_num_seqs=config.max_num_seqs or max(config.concurrency),
        load_format=config.load_format,
        max_num_batched_tokens=slots,
        extra={"max_cudagraph_capture_size": capture_size} if capture_size else {},
        # Prompts are repeated, and cached prompts would not need prefill.
        enable_prefix_caching=False,
    )
    setups, notes = make_setups(config, spec, model, hardware)
    price, no_price = _price(config, hardware)
    precision = spec_precision(spec, hardware)
    require_capacity(setups, model, hardware)
    own = {
        "precision": precision.describe(),
        "requests_per_slot": config.requests_per_slot,
        "load_format": spec.load_format,
        # The rates belong to each engine. Without rates this has always been an empty list.
        "synthetic_acceptance": "by lot" if config.synthetic_acceptance else [],
        "max_num_seqs": spec.max_num_seqs,
        "max_cudagraph_capture_size": capture_size,
    }
    return BenchPlan(
        config=config,
        hardware=hardware,
        model=model,
        spec=spec,
        precision=precision,
        setups=setups,
        price=price,
        notes=notes + no_price,
        # Included only if set, for compatibility with folders of earlier versions.
        own=own | ({"max_num_batched_tokens": slots} if slots else {}),
    )


def _price(config: BenchConfig, hardware: Hardware) -> tuple[Price | None, list[str]]:
    """Return the price, or None and a note. A price is only required if the user set a price option."""
    try:
        price = resolve_price(config, hardware)
    except PriceError as error:
        if any(name in config.model_fields_set for name in PRICE_OPTIONS):
            raise
        hint = error.hint.partition("\n")[0]  # without the list of choices
        return None, [f"tokens per dollar are unknown: {error.message} ({hint})"]
    require_device(price, "accelerator" if hardware.platform == "cuda" else "vcpu", "engines here")
    return price, []
