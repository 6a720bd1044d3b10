"""The plan of a measurement: target, engines, passes, price.

Configuration errors are raised here or in `bench/prompts.py`, before an engine starts.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, cast

from peagle.bench.config import BenchConfig, MeasurementOptions, parse_synthetic_acceptance, rates_for
from peagle.bench.folder import digest
from peagle.bench.prompts import Dataset
from peagle.catalog.drafters import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import ResolvedModel, precision_for, target_fields
from peagle.economics.price_options import PRICE_OPTIONS, require_device, resolve_price
from peagle.economics.prices import Price
from peagle.engine.accelerators import require_usable
from peagle.engine.attention import check_backends
from peagle.engine.keys import (
    apply_drafter_options,
    drafter_note,
    non_default_options,
    spec_fields,
    verify_for,
    widest_head_dim,
)
from peagle.engine.memory import check_capacity
from peagle.engine.precision import Precision
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec, EngineSpec, LookupMethod, spec_precision
from peagle.engine.steps import check_slots
from peagle.errors import ConfigError, DrafterError, PriceError
from peagle.hardware import Hardware
from peagle.profiles.measurements import METHOD_NAMES, NONE, method_label
from peagle.provenance import versions

_DEFAULT_KS = (3, 5, 7)  # to compare, if all drafts are verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine to measure: a method and K."""

    name: str
    label: str
    method: str
    k: int
    spec: EngineSpec = field(compare=False)
    head: str | None = None  # name of the head; None without one
    fingerprint: str = ""  # of the head's weights

    @property
    def drafter(self) -> DrafterSpec | None:
        return self.spec.drafter


def target_spec(
    config: MeasurementOptions,
    model: ResolvedModel,
    hardware: Hardware,
    *,
    max_num_seqs: int,
    extra: Mapping[str, Any] = MappingProxyType({}),
    **command_fields: Any,
) -> EngineSpec:
    """Return the engine of a configuration, without a drafter. `command_fields` are set by the command."""
    if reserved := spec_fields(config):
        raise ConfigError(
            f"--engine-arg {next(iter(reserved))} conflicts with a setting of the measurement",
            hint="remove it. `peagle bench --load-format` sets the load format. Prefix caching is always disabled,"
            " because prompts repeat",
        )
    precision = precision_for(config, model, hardware)
    fields = target_fields(config, model, hardware, precision)
    # Results are stored under the requested precision.
    fields |= {"precision": config.precision, "extra": {**extra, **fields["extra"]}}
    return EngineSpec(**fields, max_num_seqs=max_num_seqs, **command_fields)


def make_setup(
    spec: EngineSpec, drafter: DrafterSpec | None, *, label: str = "", head: str | None = None, fingerprint: str = ""
) -> Setup:
    """Return the setup of an engine, with or without a drafter. By default, its label consists of method and K."""
    method, k = (drafter.method, drafter.num_speculative_tokens) if drafter else (NONE, 0)
    label = label or method_label(method, k)
    name_parts: list[str] = [method]
    if fingerprint:
        name_parts.append(digest(fingerprint))
    if drafter is not None and drafter.synthetic_rates:
        # In stored results, "lot" means that drafts are accepted at random.
        name_parts.append(f"lot-{digest(repr(drafter.synthetic_rates))}")
    if drafter is not None and drafter.lookup:
        name_parts.append("lookup")
        label += " with lookup"
    if drafter is not None and drafter.verify == "auto":
        name_parts.append("auto")
        label += ", verify auto"
    return Setup(
        name="-".join([*name_parts, f"k{k}"]),
        label=label,
        method=method,
        k=k,
        spec=replace(spec, drafter=drafter),
        head=head,
        fingerprint=fingerprint,
    )


def make_setups(
    config: BenchConfig, spec: EngineSpec, model: ResolvedModel, hardware: Hardware
) -> tuple[list[Setup], list[str]]:
    if config.synthetic_acceptance and hardware.platform == "cpu":
        raise ConfigError(
            "vLLM 0.29 crashes on a CPU with --synthetic-acceptance",
            hint="without it, --load-format dummy works on a CPU, but random weights accept almost no drafts",
        )
    setups: list[Setup] = []
    notes: list[str] = []
    for method in config.methods:
        if method == NONE:
            setups.append(make_setup(spec, None))
            continue
        has_own_k = method in DRAFT_METHODS and verify_for(method, config, hardware) == "auto"
        ks = config.num_speculative_tokens or ([] if has_own_k else _DEFAULT_KS)
        if method in DRAFT_METHODS:
            head = _head(method, config, model, hardware, max(ks, default=None))
            assert head.spec is not None, "_head() returns a head"
            drafter, head_name, fingerprint = (
                apply_drafter_options(head.spec, config, hardware),
                head.name,
                head.fingerprint or "",
            )
            notes.append(f"{METHOD_NAMES[method]}: {head_name}, {head.note}{drafter_note(drafter)}")
        else:
            if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
                raise ConfigError(
                    "the method suffix requires the package arctic-inference, which is not installed",
                    hint="pip install arctic-inference, or remove suffix from --methods",
                )
            drafter = DrafterSpec(method=cast(LookupMethod, method), model="", num_speculative_tokens=1)
            head_name, fingerprint = None, ""
        for k in ks or [drafter.num_speculative_tokens]:
            drafter_at_k = _with_synthetic_acceptance(replace(drafter, num_speculative_tokens=k), config)
            setups.append(make_setup(spec, drafter_at_k, head=head_name, fingerprint=fingerprint))
    return setups, notes


def require_capacity(setups: Iterable[Setup], model: ResolvedModel, hardware: Hardware) -> None:
    """Check that each engine fits the hardware, has room for prompts in a step, and has working attention kernels."""
    require_usable(hardware)
    for setup in setups:
        check_slots(setup.spec)
        check_backends(setup.spec, hardware, head_dim=widest_head_dim(model.config))
        check_capacity(setup.spec, hardware)


def _head(
    method: str, config: BenchConfig, model: ResolvedModel, hardware: Hardware, max_k: int | None
) -> ResolvedDrafter:
    name = config.heads.get(method)
    try:
        head = resolve_drafter(name or method, model, 1, num_speculative_tokens=max_k, platform=hardware.platform)
    except DrafterError as error:
        if name:
            raise
        hint = f"set --drafter {method}=HEAD, or remove {method} from --methods"
        raise DrafterError(error.message, hint=hint) from error
    assert head.spec is not None, "a method always resolves to a head"
    if head.spec.method != method:
        raise DrafterError(f"--drafter {method}={name}: this is a head of method {head.spec.method}")
    return head


def _with_synthetic_acceptance(drafter: DrafterSpec, config: BenchConfig) -> DrafterSpec:
    if not config.synthetic_acceptance:
        return drafter
    method, k = drafter.method, drafter.num_speculative_tokens
    rates = rates_for(method, k, parse_synthetic_acceptance(config.synthetic_acceptance))
    if rates is None:
        raise ConfigError(
            f"--synthetic-acceptance has no value for {method_label(method, k)}",
            hint=f"real and synthetic acceptance cannot be compared: add {method}=LENGTH, or remove the method",
        )
    return replace(drafter, synthetic_rates=rates)


MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of the prompts through an engine at one concurrency."""

    setup: Setup
    concurrency: int
    repeat: int


def all_passes(setups: Sequence[Setup], concurrencies: Sequence[int], repeats: int, rounds: int) -> list[Pass]:
    """Return the passes in order.

    Repeats of one engine and concurrency should be far apart, with other methods in between, so that a drift of the
    machine's speed affects all methods. But each start of an engine takes a minute or more, so the repeats are divided
    among rounds. Every round runs each engine once, in alternating order (A B C, C B A), so that a steady drift affects
    all engines equally. The last engine of a round is not restarted for the next.
    """
    num_rounds = min(rounds, repeats)
    passes = []
    for round_index in range(num_rounds):
        repeats_of_round = range(round_index, repeats, num_rounds)
        for setup in setups if round_index % 2 == 0 else reversed(setups):
            passes += [Pass(setup=setup, concurrency=c, repeat=r) for r in repeats_of_round for c in concurrencies]
    return passes


def num_starts(passes: Iterable[Pass]) -> int:
    return sum(1 for _ in groupby(passes, key=lambda planned: planned.setup))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The engines to measure, and their common settings.

    Attributes:
        command_settings: JSON-ready settings that all passes of this command share.
        category_column: column to group acceptance by; None disables it.
    """

    config: BenchConfig
    hardware: Hardware
    model: ResolvedModel
    spec: EngineSpec
    precision: Precision
    setups: list[Setup]
    price: Price | None
    notes: list[str]
    command_settings: Mapping[str, Any]
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
            "dataset": dataset.fingerprint_fields(),
            "hardware": self.hardware.describe(),
            "versions": {name: version for name, version in versions().items() if name.startswith("vllm")},
            **non_default_options(self.config),
        }
        # Included only if set, for compatibility with folders of earlier versions.
        return shared | ({MODEL_RUNNER: runner} if runner else {}) | dict(self.command_settings)


def chosen_model_runner() -> str | None:
    return os.environ.get(MODEL_RUNNER) or None


def make_plan(config: BenchConfig, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
    capture_size, step_tokens = config.max_cudagraph_capture_size, config.max_num_batched_tokens
    spec = target_spec(
        config,
        model,
        hardware,
        max_num_seqs=config.max_num_seqs or max(config.concurrency),
        load_format=config.load_format,
        max_num_batched_tokens=step_tokens,
        extra={"max_cudagraph_capture_size": capture_size} if capture_size else {},
        # Prompts are repeated, and cached prompts would not need prefill.
        enable_prefix_caching=False,
    )
    setups, notes = make_setups(config, spec, model, hardware)
    price, price_notes = _price(config, hardware)
    precision = spec_precision(spec, hardware)
    require_capacity(setups, model, hardware)
    command_settings = {
        "precision": precision.describe(),
        "requests_per_slot": config.requests_per_slot,
        "load_format": spec.load_format,
        # The rates are part of each engine's name. Without rates, the value is an empty list, as in earlier versions.
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
        notes=notes + price_notes,
        # Included only if set, for compatibility with folders of earlier versions.
        command_settings=command_settings | ({"max_num_batched_tokens": step_tokens} if step_tokens else {}),
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
    require_device(price, "accelerator" if hardware.platform == "cuda" else "vcpu", engines="engines here")
    return price, []
