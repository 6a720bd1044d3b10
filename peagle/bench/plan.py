"""From what a user asked for to what will be measured: target, engines, prices.

Starts nothing.

Everything that can be refused is refused here, in `setups` or in `peagle.bench.prompts`, before an engine starts.

A repeat of a cell should come long after the one before it, with other methods in between, so that a machine that
drifts drifts under all of them; but each start of an engine costs a minute or more. So the repeats are shared out among
rounds. In every round each engine is up once; the order is turned round from one round to the next (A B C, C B A), so
that a steady drift weighs on all alike, and the engine at the turn stays up.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from peagle.bench.config import NONE, BenchConfig, parse_synthetic, rates_for
from peagle.bench.prompts import Dataset
from peagle.bench.target import target_fingerprint, target_spec
from peagle.catalog.drafters import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_options import PRICE_KEYS, require_device, resolve_price
from peagle.economics.prices import Price
from peagle.engine.arguments import check_slots
from peagle.engine.memory import check_capacity
from peagle.engine.precision import Precision
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec, EngineSpec, spec_precision
from peagle.errors import ConfigError, DrafterError, PriceError
from peagle.hardware import Hardware
from peagle.profiles.measurements import METHOD_NAMES, method_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A method at a K: one engine.

    Attributes:
        method: one of `config.METHODS`.
        k: draft tokens a step, 0 without any.
        drafter: what the engine is given, None without one.
        head: what people call the head; None without one.
        fingerprint: changes when the head does; empty without one.
    """

    method: str
    k: int
    drafter: DrafterSpec | None
    head: str | None = None
    fingerprint: str = ""

    @property
    def label(self) -> str:
        """For people: "P-EAGLE K=5"."""
        return method_label(self.method, self.k)


def make_setups(config: BenchConfig, model: ResolvedModel, hardware: Hardware) -> tuple[list[Setup], list[str]]:
    """The engines, method by method with K ascending, and notes on the heads.

    Raises:
        DrafterError: a method has no head, or one of another method.
        ConfigError: the synthetic acceptance does not fit a K or the hardware, or a package is missing.
    """
    if config.synthetic_acceptance and hardware.platform == "cpu":
        raise ConfigError(
            "vLLM cannot accept drafts by lot on a CPU (0.29 dies at the first draft)",
            hint="--load-format dummy alone runs here, with what random weights accept: next to nothing",
        )
    setups: list[Setup] = []
    notes: list[str] = []
    for method in config.methods:
        if method == NONE:
            setups.append(Setup(method=NONE, k=0, drafter=None))
        elif method in DRAFT_METHODS:
            head = _head(method, config, model, hardware)
            setups += [_with_head(method, k, head) for k in config.num_speculative_tokens]
            notes.append(f"{METHOD_NAMES[method]}: {head.name}, {head.note}")
        else:
            setups += [_without_head(method, k) for k in config.num_speculative_tokens]
    return [_by_lot(setup, config) for setup in setups], notes


def _head(method: str, config: BenchConfig, model: ResolvedModel, hardware: Hardware) -> ResolvedDrafter:
    named = config.heads.get(method)
    largest = max(config.num_speculative_tokens)
    try:
        head = resolve_drafter(named or method, model, 1, num_speculative_tokens=largest, platform=hardware.platform)
    except DrafterError as error:
        if named:
            raise
        way_out = f"name one with --drafter {method}=HEAD, or leave {method} out of --methods"
        raise DrafterError(error.message, hint=way_out) from error
    assert head.spec is not None, "a head that was named is never none"
    if head.spec.method != method:
        raise DrafterError(f"--drafter {method}={named}: it is a head of {head.spec.method}")
    return head


def _with_head(method: str, k: int, head: ResolvedDrafter) -> Setup:
    assert head.spec is not None, "_head() gives one"
    drafter = replace(head.spec, num_speculative_tokens=k)
    return Setup(method=method, k=k, drafter=drafter, head=head.name, fingerprint=head.fingerprint or "")


def _without_head(method: str, k: int) -> Setup:
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "vLLM looks suffixes up with the package arctic-inference, which is not installed",
            hint="pip install arctic-inference, or leave suffix out of --methods",
        )
    drafter = DrafterSpec(method="ngram" if method == "ngram" else "suffix", model="", num_speculative_tokens=k)
    return Setup(method=method, k=k, drafter=drafter)


def _by_lot(setup: Setup, config: BenchConfig) -> Setup:
    """The same setup with synthetic acceptance, where it is asked for.

    Then every method that drafts needs one.

    Raises:
        ConfigError: nothing was said for this method.
    """
    if not config.synthetic_acceptance or setup.drafter is None:
        return setup
    rates = rates_for(setup.method, setup.k, parse_synthetic(config.synthetic_acceptance))
    if rates is None:
        raise ConfigError(
            f"--synthetic-acceptance says nothing for {setup.label}",
            hint=f"real and synthetic acceptance cannot be compared: add {setup.method}=LENGTH, or leave it out",
        )
    return replace(setup, drafter=replace(setup.drafter, synthetic_rates=rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """All prompts once through one engine at one concurrency."""

    setup: Setup
    concurrency: int
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """An engine that is up once, and the passes that it runs."""

    setup: Setup
    passes: tuple[Pass, ...]


def all_passes(setups: Sequence[Setup], concurrencies: Sequence[int], repeats: int, rounds: int) -> list[Pass]:
    """Every pass in its order.

    Within an engine, the concurrencies of a repeat come before the next repeat.
    """
    num_rounds = min(rounds, repeats)
    ordered = []
    for round_index in range(num_rounds):
        share = [repeat for repeat in range(repeats) if repeat % num_rounds == round_index]
        for setup in setups if round_index % 2 == 0 else reversed(setups):
            ordered += [Pass(setup=setup, concurrency=c, repeat=r) for r in share for c in concurrencies]
    return ordered


def visits(passes: Sequence[Pass]) -> list[Visit]:
    """One engine start for each stretch of passes of the same engine."""
    return [Visit(setup=setup, passes=tuple(stretch)) for setup, stretch in groupby(passes, key=lambda one: one.setup)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cells to measure and the engine that they share.

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
        """The price of one engine's devices in USD per second, as the ledger counts it.

        None where no price is known.
        """
        on_gpu = self.hardware.platform == "cuda"
        num_devices = self.spec.num_accelerators if on_gpu else self.hardware.num_cpus
        return num_devices * self.price.usd_per_device_s if self.price else None

    def engine_spec(self, setup: Setup) -> EngineSpec:
        """The engine of one setup."""
        return replace(self.spec, drafter=setup.drafter)

    def fingerprint(self, dataset: Dataset) -> dict[str, Any]:
        """The settings that all passes of a folder share; JSON-ready.

        Methods, K, concurrencies and repeats can be added to a folder.
        """
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
    """The price, or why there is none.

    Speeds can be measured without one, unless the user speaks of it.
    """
    try:
        price = resolve_price(config, hardware)
    except PriceError as error:
        if any(name in config.model_fields_set for name in PRICE_KEYS):
            raise
        return None, [f"tokens per dollar are left out: {error.message} ({error.hint})"]
    require_device(price, "accelerator" if hardware.platform == "cuda" else "vcpu", "engines here")
    return price, []
