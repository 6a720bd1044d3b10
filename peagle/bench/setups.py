"""The engines of a benchmark: each method at each K, with its head. Starts nothing.

What a method lacks (a head, a package) is told here, before an engine starts.
"""

import importlib.util
from dataclasses import dataclass, replace

from peagle.bench.config import NONE, BenchConfig
from peagle.bench.synthetic import parse_synthetic, rates_for
from peagle.catalog.resolve import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import ResolvedModel
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec
from peagle.errors import ConfigError, DrafterError
from peagle.hardware import Hardware
from peagle.measurement.cells import METHOD_NAMES, method_label


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
    """The engines, method by method with K ascending, and what the user should know of the heads.

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
    """The same, with acceptance by lot where it is asked for; then every method that drafts needs it.

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
