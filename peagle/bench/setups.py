"""The engines of a measurement: target, drafter, K."""

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
    """An engine to measure: a method and K.

    Attributes:
        name: name of its files, unique for the head and the synthetic acceptance.
        label: display name, such as "P-EAGLE K=5".
        method: one of `peagle.profiles.measurements.METHODS`.
        k: draft tokens per step; 0 without drafting.
        head: display name of the head, if any.
        fingerprint: of the head; empty without a head.
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
    """Return the engine of a configuration, without a drafter.

    Args:
        extra: vLLM arguments derived from the command's options.
        own: fields that the command sets itself.
    """
    if fixed := spec_fields(config):
        raise ConfigError(
            f"--engine-arg {next(iter(fixed))} conflicts with a setting of the measurement",
            hint="use `peagle bench --load-format` for the load format; prefix caching is disabled, since prompts"
            " repeat",
        )
    precision = precision_for(config, model, hardware)
    fields = target_fields(config, model, hardware, precision)
    # Results are stored under the requested precision.
    fields |= {"precision": config.precision, "extra": {**extra, **fields["extra"]}}
    return EngineSpec(**fields, max_num_seqs=max_num_seqs, **own)


def make_setup(
    spec: EngineSpec, drafter: DrafterSpec | None, *, label: str = "", head: str | None = None, fingerprint: str = ""
) -> Setup:
    """Return the setup of an engine with or without a drafter.

    Args:
        spec: the engine without drafter.
        label: replaces the default label of method and K.
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
    """Return the engines of a benchmark, by method and ascending K, and notes on their heads."""
    if config.synthetic_acceptance and hardware.platform == "cpu":
        raise ConfigError(
            "vLLM 0.29 crashes on a CPU with --synthetic-acceptance",
            hint="--load-format dummy works on a CPU without it, but random weights accept almost no drafts",
        )
    setups: list[Setup] = []
    notes: list[str] = []
    for method in config.methods:
        if method == NONE:
            setups.append(make_setup(spec, None))
            continue
        if method in DRAFT_METHODS:
            head = _head(method, config, model, hardware)
            assert head.spec is not None, "_head() returns a head"
            drafter, name, fingerprint = drafter_with(head.spec, config, hardware), head.name, head.fingerprint or ""
            notes.append(f"{METHOD_NAMES[method]}: {name}, {head.note}{lookup_note(drafter)}")
        else:
            drafter, name, fingerprint = _lookup(method), None, ""
        for k in config.num_speculative_tokens:
            at_k = _with_synthetic_acceptance(replace(drafter, num_speculative_tokens=k), config)
            setups.append(make_setup(spec, at_k, head=name, fingerprint=fingerprint))
    return setups, notes


def require_capacity(setups: Iterable[Setup], model: ResolvedModel, hardware: Hardware) -> None:
    """Check that each engine fits the hardware, its steps have room for prompts, and its attention works here."""
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
        hint = f"set --drafter {method}=HEAD, or remove {method} from --methods"
        raise DrafterError(error.message, hint=hint) from error
    assert head.spec is not None, "a method always resolves to a head"
    if head.spec.method != method:
        raise DrafterError(f"--drafter {method}={named}: is a head of method {head.spec.method}")
    return head


def _lookup(method: str) -> DrafterSpec:
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "the method suffix requires the package arctic-inference, which is not installed",
            hint="pip install arctic-inference, or remove suffix from --methods",
        )
    return DrafterSpec(method=cast(LookupMethod, method), model="", num_speculative_tokens=1)


def _with_synthetic_acceptance(drafter: DrafterSpec, config: BenchConfig) -> DrafterSpec:
    if not config.synthetic_acceptance:
        return drafter
    method, k = drafter.method, drafter.num_speculative_tokens
    rates = rates_for(method, k, parse_synthetic(config.synthetic_acceptance))
    if rates is None:
        raise ConfigError(
            f"--synthetic-acceptance has no value for {method_label(method, k)}",
            hint=f"real and synthetic acceptance cannot be compared: add {method}=LENGTH, or remove the method",
        )
    return replace(drafter, synthetic_rates=rates)
