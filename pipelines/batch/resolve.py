"""Resolve a run: model, drafter, K, precision, hardware, price, placement.

Every configuration error is raised here, before an engine starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from peagle.catalog.drafters import ResolvedDrafter
from peagle.catalog.local import localize, tokenizer_of
from peagle.catalog.targets import NO_COMMITS, ResolvedModel
from peagle.economics.baseline import Baseline
from peagle.economics.price_options import require_device, resolve_price
from peagle.economics.prices import Price
from peagle.engine.precision import Precision
from peagle.engine.spec import EngineSpec
from peagle.engine.trials import check_schema
from peagle.engine_options import ResolvedEngine, compose_fake_engine, resolve_engine
from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.hardware import Hardware
from peagle.profiles.watch import DrafterWatch
from peagle.requests.builder import SamplingSpec
from peagle.requests.prompts import PromptSpec, resolve_prompts
from peagle.requests.sampling import SamplingLimits, conflict
from pipelines.batch.config import GenerateConfig
from pipelines.batch.lender import Lender
from pipelines.cluster.placement import Neighbours, Placement, place


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A resolved run.

    Attributes:
        engine: names its models so that any node can resolve them.
        tokenizer: the model whose tokenizer is used; None for the fake engine's bytes.
        placement: the resources of each engine.
        slot_group: the name under which its engines number their slots on a node; None for the run's own.
        lender: None if the run starts its own engines.
        drafter_watch: None without a drafter.
    """

    config: GenerateConfig
    hardware: Hardware
    engine: ResolvedEngine
    tokenizer: str | None
    prompts: PromptSpec
    sampling: SamplingSpec
    price: Price
    placement: Placement
    slot_group: str | None = None
    lender: Lender | None = None
    drafter_watch: DrafterWatch | None = None

    @property
    def spec(self) -> EngineSpec:
        """The engine's spec."""
        return self.engine.spec

    @property
    def precision(self) -> Precision:
        """The engine's precision on this hardware."""
        return self.engine.precision

    @property
    def model(self) -> ResolvedModel:
        """The target."""
        return self.engine.model

    @property
    def drafter(self) -> ResolvedDrafter:
        """The drafter, or the reason why there is none."""
        return self.engine.drafter

    @property
    def baseline(self) -> Baseline | None:
        """Measured step times of the engine, or None."""
        return self.engine.baseline(self.hardware)

    def fingerprint(self, corpus: str) -> dict[str, Any]:
        """Return the settings that must be equal to continue this run."""
        drafter = self.spec.drafter
        return {
            "model": {"name": self.model.name, "weights": self.model.fingerprint},
            "drafter": {
                "name": self.drafter.name,
                "weights": self.drafter.fingerprint,
                "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
                **({"lookup": True} if drafter and drafter.lookup else {}),  # left out so that older runs continue
            },
            "precision": self.precision.describe(),
            # Any of them may change an answer.
            **({"engine_args": further} if (further := {**self.spec.extra, **self.config.engine_args}) else {}),
            "max_model_len": self.spec.max_model_len,
            "sampling": {**self.sampling.base, "column": self.sampling.column},
            "prompts": self.prompts.to_dict(),
            "corpus": {"content": corpus, "limit": self.config.limit},
        }


def resolve(
    config: GenerateConfig,
    hardware: Hardware,
    columns: list[str],
    *,
    is_batch: bool = False,
    num_nodes: int = 1,
    neighbours: Neighbours | None = None,
    commits: Mapping[str, str] = NO_COMMITS,
    announce: Callable[[str], None],
) -> ResolvedRun:
    """Resolve a run.

    Args:
        columns: of the corpus.
        num_nodes: the nodes that share the engines.
        is_batch: whether the corpus is an OpenAI batch.
        neighbours: other engines on the same nodes.
        commits: by hub id, of the run that continues; others are looked up.
        announce: called before something slow, such as converting a model.

    Raises:
        ConfigError: model, drafter, precision, price or prompts are invalid.
        CapacityError: the engines do not fit on the hardware.
    """
    machines = resolve_machines(
        config, hardware, num_nodes=num_nodes, neighbours=neighbours, commits=commits, announce=announce
    )
    engine = machines.engine
    tokenizer = None if config.engine == "fake" else engine.spec.model
    if tokenizer is not None and config.json_schema is not None and find_spec("xgrammar") is not None:
        check_schema(
            config.json_schema,
            model=localize(tokenizer, engine.spec.revision, weights=False),
            revision=engine.spec.revision,
            vocab_size=engine.model.vocab_size,
        )
    return ResolvedRun(
        config=config,
        hardware=hardware,
        engine=engine,
        tokenizer=tokenizer,
        prompts=resolve_prompts(
            config,
            columns,
            bool(tokenizer_of(tokenizer, engine.spec.revision).chat_template),
            body_column="body" if is_batch else None,
            where=f"input {config.input}",
        ),
        sampling=_sampling(config, hardware, engine, columns, is_batch),
        price=machines.price,
        placement=machines.placement,
        slot_group=neighbours.slot_group if neighbours else None,
        drafter_watch=engine.drafter_watch(hardware, engine.spec.max_num_seqs),
    )


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The part of a run that does not depend on the corpus."""

    placement: Placement
    price: Price
    engine: ResolvedEngine


def resolve_machines(
    config: GenerateConfig,
    hardware: Hardware,
    *,
    num_nodes: int = 1,
    neighbours: Neighbours | None = None,
    commits: Mapping[str, str] = NO_COMMITS,
    announce: Callable[[str], None],
) -> Machines:
    """Resolve placement, price and engine, with the arguments of `resolve`.

    Raises:
        PeagleError: as `resolve`.
    """
    placement = neighbours.placement if neighbours else _place(config, hardware, num_nodes)
    price = resolve_price(config, hardware)
    require_device(price, placement.device, "engines here")
    if config.engine == "fake":
        return Machines(placement=placement, price=price, engine=compose_fake_engine(config, hardware))
    engine = resolve_engine(
        config,
        hardware,
        num_engines_on_node=placement.num_engines_on_node,
        num_nodes=config.nodes_per_engine,
        commits=commits,
        announce=announce,
    )
    return Machines(placement=placement, price=price, engine=engine)


def _place(config: GenerateConfig, hardware: Hardware, num_nodes: int) -> Placement:
    # The fake engine binds no cores: as many of them run as there are logical CPUs.
    node = replace(hardware, core_ids=()) if config.engine == "fake" else hardware
    return place(
        node,
        num_engines=config.engine_range.smallest,
        accelerators_per_engine=config.accelerators_per_engine,
        num_nodes=num_nodes,
        nodes_per_engine=config.nodes_per_engine,
        most_engines=config.engine_range.largest,
        accelerator_type=config.accelerator_type,
    )


def _sampling(
    config: GenerateConfig, hardware: Hardware, engine: ResolvedEngine, columns: list[str], is_batch: bool
) -> SamplingSpec:
    """Return the run's parameters and the column with those of rows.

    Raises:
        ConfigError: the engine cannot use them.
        InputError: the named column is not in the corpus.
    """
    spec = engine.spec
    assert spec.max_model_len is not None, "compose_engine() sets it"
    limits = SamplingLimits(
        max_model_len=spec.max_model_len,
        has_drafter=spec.drafter is not None and hardware.platform != "cpu" and config.engine != "fake",
        can_seed=hardware.platform != "cpu" or config.engine == "fake",
        vocab_size=engine.model.vocab_size,
    )
    if wrong := conflict(config.sampling(), limits):
        raise ConfigError(wrong)
    column = config.sampling_column
    if is_batch and column is not None:
        raise ConfigError("sampling_column cannot be used with an OpenAI batch: each body has its own parameters")
    if column is None and not is_batch:
        column = "sampling" if "sampling" in columns else None
    elif column == "none":
        column = None
    elif column is not None and column not in columns:
        raise InputError(f"input {config.input} has no column {column!r}", hint=did_you_mean(column, columns))
    return SamplingSpec(base=config.sampling(), column=column, limits=limits)
