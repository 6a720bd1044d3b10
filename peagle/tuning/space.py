"""All configurations of a tuning: engines, and the load each can serve.

Starts nothing.

An engine is a method, K, precision and number of token slots, sized for the largest concurrency; it serves each
concurrency, so that one start measures several configurations. Engines, checks and the price are those of a benchmark.
"""

from dataclasses import dataclass, replace
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.folder import digest
from peagle.bench.options import MeasurementKeys
from peagle.bench.plan import Plan, Setup, make_plan
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_options import PriceKeys, resolve_price
from peagle.engine.arguments import check_slots, max_num_batched_tokens
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware
from peagle.tuning.config import AUTO, TuneConfig
from peagle.tuning.halving import Arm

_DEFAULT_SIZES = {"cpu": [1, 4, 16], "cuda": [8, 32, 128]}
_SHARED = {*PriceKeys.model_fields, *MeasurementKeys.model_fields} - {"precision", "output"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine that can be started.

    Attributes:
        name: of its files and log.
        precision, num_slots: as they were asked for: "auto" or a value.
        spec: the engine, its token slots fixed.
        drafter: what --drafter takes for it.
    """

    name: str
    setup: Setup
    precision: str
    num_slots: str
    spec: EngineSpec
    drafter: str

    @property
    def label(self) -> str:
        """For people: "P-EAGLE K=5, fp8, 4096 slots"."""
        precision = "" if self.precision == AUTO else f", {self.precision}"
        slots = "" if self.num_slots == AUTO else f", {self.num_slots} slots"
        return f"{self.setup.label}{precision}{slots}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that can be measured.

    Attributes:
        plans: a benchmark's plan for each precision; they differ in it alone.
        candidates: by name, in the order in which they are started.
        sizes: concurrencies, ascending.
    """

    plans: list[Plan]
    candidates: dict[str, Candidate]
    sizes: list[int]

    @property
    def plan(self) -> Plan:
        """The plan that all of them share."""
        return self.plans[0]

    @property
    def arms(self) -> list[Arm]:
        """Every configuration, engine by engine."""
        return [
            Arm(engine=one.name, concurrency=size, drafts=one.setup.drafter is not None)
            for one in self.candidates.values()
            for size in self.sizes
        ]

    @property
    def notes(self) -> list[str]:
        """Notes for the user beforehand, each once."""
        return list(dict.fromkeys(note for plan in self.plans for note in plan.notes))


def make_space(config: TuneConfig, hardware: Hardware, model: ResolvedModel) -> Space:
    """Every engine, checked.

    Raises:
        ConfigError: of the kind that fits (drafter, precision, context, token slots, price).
        CapacityError: the hardware cannot hold an engine.
    """
    if config.objective == "tokens-per-dollar":
        resolve_price(config, hardware)  # raises where a benchmark would do without
    sizes = config.max_num_seqs or _DEFAULT_SIZES[hardware.platform]
    plans = [make_plan(_bench_config(config, precision, sizes), hardware, model) for precision in config.precision]
    found = [
        _candidate(config, plan, setup, slots)
        for plan in plans
        for slots in config.max_num_batched_tokens
        for setup in plan.setups
    ]
    return Space(plans=plans, candidates={one.name: one for one in found}, sizes=sizes)


def _bench_config(config: TuneConfig, precision: str, sizes: list[int]) -> BenchConfig:
    """The benchmark that has these engines; only what the user said is said again."""
    values: dict[str, Any] = config.model_dump(include=_SHARED & config.model_fields_set)
    varied = config.model_dump(include={"methods", "drafter", "num_speculative_tokens"})
    return BenchConfig(**{**values, **varied, "concurrency": sizes, "precision": precision})


def _candidate(config: TuneConfig, plan: Plan, setup: Setup, num_slots: str) -> Candidate:
    spec = plan.engine_spec(setup)
    slots = max_num_batched_tokens(spec, plan.hardware) if num_slots == AUTO else int(num_slots)
    spec = replace(spec, max_num_batched_tokens=slots)
    check_slots(spec)
    head = f"-{digest(setup.fingerprint)}" if setup.fingerprint else ""
    return Candidate(
        name=f"{setup.method}{head}-k{setup.k}-{plan.config.precision}-{num_slots}",
        setup=setup,
        precision=plan.config.precision,
        num_slots=num_slots,
        spec=spec,
        drafter=_drafter(config, setup),
    )


def _drafter(config: TuneConfig, setup: Setup) -> str:
    """The value of --drafter for a setup.

    The named head, wherever the command runs, or the catalog's method.
    """
    named = dict(one.split("=", 1) for one in config.drafter).get(setup.method)
    assert setup.drafter is not None or named is None, "a head is of a method that drafts"
    return setup.drafter.model if setup.drafter and named else setup.method
