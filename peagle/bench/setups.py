"""The engines of a measurement: target, drafter, K. Starts nothing.

It knows the catalog's heads and what hardware can hold; it knows nothing of prompts, passes or prices.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from peagle.bench.config import BenchConfig, MeasurementKeys
from peagle.bench.folder import digest
from peagle.bench.synthetic import parse_synthetic, rates_for
from peagle.catalog.drafters import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import ResolvedModel, precision_for, target_fields
from peagle.engine.accelerators import require_usable
from peagle.engine.attention import check_backends
from peagle.engine.keys import drafter_with, lookup_note, spec_fields, widest_head
from peagle.engine.memory import check_capacity
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec, EngineSpec, LookupMethod
from peagle.engine.steps import check_slots
from peagle.errors import ConfigError, DrafterError
from peagle.hardware import Hardware
from peagle.profiles.measurements import METHOD_NAMES, NONE, method_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One engine to measure: a method at a K.

    Attributes:
        name: of its files; another head, or another synthetic acceptance, has another one.
        label: for people: "P-EAGLE K=5".
        method: one of `peagle.profiles.measurements.METHODS`.
        k: draft tokens a step, 0 without any.
        spec: what is started.
        head: what people call the head; None without one.
        fingerprint: changes when the head does; empty without one.
    """

    name: str
    label: str
    method: str
    k: int
    spec: EngineSpec = field(compare=False)
    head: str | None = None
    fingerprint: str = ""

    @property
    def drafter(self) -> DrafterSpec | None:
        """The drafter that its engine is given; None without one."""
        return self.spec.drafter


def target_spec(
    config: MeasurementKeys,
    model: ResolvedModel,
    hardware: Hardware,
    *,
    max_num_seqs: int,
    extra: Mapping[str, Any] = MappingProxyType({}),
    **own: Any,
) -> EngineSpec:
    """The engine without a drafter that a configuration asks for.

    Args:
        extra: arguments of vLLM that a command's own keys stand for.
        own: fields of it that a command sets itself.

    Raises:
        ConfigError: the context is longer than the model's, or vLLM has no such argument.
        PrecisionError: the hardware cannot run it.
    """
    if fixed := spec_fields(config):
        raise ConfigError(
            f"{next(iter(fixed))} is the measurement's own to set, not --engine-arg's",
            hint="peagle bench has --load-format; prompts are asked again, so none is cached",
        )
    precision = precision_for(config, model, hardware)
    fields = target_fields(config, model, hardware, precision)
    # Its results are filed under the precision that was asked for.
    fields |= {"precision": config.precision, "extra": {**extra, **fields["extra"]}}
    return EngineSpec(**fields, max_num_seqs=max_num_seqs, **own)


def make_setup(
    spec: EngineSpec, drafter: DrafterSpec | None, *, label: str = "", head: str | None = None, fingerprint: str = ""
) -> Setup:
    """The engine of a drafter, or of none.

    Args:
        spec: the engine without it.
        label: where the method and K do not say enough.
    """
    method, k = (drafter.method, drafter.num_speculative_tokens) if drafter else (NONE, 0)
    rates = drafter.synthetic_rates if drafter else None
    marks = [digest(fingerprint)] if fingerprint else []
    marks += [f"lot-{digest(repr(rates))}"] if rates else []
    looks_up = drafter is not None and drafter.lookup
    marks += ["lookup"] if looks_up else []
    return Setup(
        name="-".join([method, *marks, f"k{k}"]),
        label=(label or method_label(method, k)) + (" with lookup" if looks_up else ""),
        method=method,
        k=k,
        spec=replace(spec, drafter=drafter),
        head=head,
        fingerprint=fingerprint,
    )


def make_setups(
    config: BenchConfig, spec: EngineSpec, model: ResolvedModel, hardware: Hardware
) -> tuple[list[Setup], list[str]]:
    """The engines of a benchmark, and notes on their heads.

    They are in the order of the methods, K ascending.

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
            setups.append(make_setup(spec, None))
            continue
        if method in DRAFT_METHODS:
            head = _head(method, config, model, hardware)
            assert head.spec is not None, "_head() gives one"
            drafter, name, fingerprint = drafter_with(head.spec, config, hardware), head.name, head.fingerprint or ""
            notes.append(f"{METHOD_NAMES[method]}: {name}, {head.note}{lookup_note(drafter)}")
        else:
            drafter, name, fingerprint = _lookup(method), None, ""
        for k in config.num_speculative_tokens:
            at_k = _by_lot(replace(drafter, num_speculative_tokens=k), config)
            setups.append(make_setup(spec, at_k, head=name, fingerprint=fingerprint))
    return setups, notes


def require_capacity(setups: Iterable[Setup], model: ResolvedModel, hardware: Hardware) -> None:
    """Require that the hardware can hold each engine.

    The steps of an engine must leave room for prompts, and its attention must be right on this hardware.
    """
    require_usable(hardware)
    for setup in setups:
        check_slots(setup.spec)
        check_backends(setup.spec, hardware, head_dim=widest_head(model.config))
        check_capacity(setup.spec, hardware)


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


def _lookup(method: str) -> DrafterSpec:
    """A drafter without a head."""
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "vLLM looks suffixes up with the package arctic-inference, which is not installed",
            hint="pip install arctic-inference, or leave suffix out of --methods",
        )
    return DrafterSpec(method=cast(LookupMethod, method), model="", num_speculative_tokens=1)


def _by_lot(drafter: DrafterSpec, config: BenchConfig) -> DrafterSpec:
    """The same drafter with synthetic acceptance, where it is asked for.

    Then every method that drafts needs one.

    Raises:
        ConfigError: nothing was said for this method.
    """
    if not config.synthetic_acceptance:
        return drafter
    method, k = drafter.method, drafter.num_speculative_tokens
    rates = rates_for(method, k, parse_synthetic(config.synthetic_acceptance))
    if rates is None:
        raise ConfigError(
            f"--synthetic-acceptance says nothing for {method_label(method, k)}",
            hint=f"real and synthetic acceptance cannot be compared: add {method}=LENGTH, or leave it out",
        )
    return replace(drafter, synthetic_rates=rates)
