"""Resolve a run: model, drafter, K, precision, hardware, price, placement.

Every configuration error is raised here, before an engine starts.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from peagle.catalog.drafters import ResolvedDrafter
from peagle.catalog.local import local_model_path, tokenizer_of
from peagle.catalog.targets import NO_COMMITS, ResolvedModel
from peagle.economics.baseline import Baseline
from peagle.economics.price_options import require_device, resolve_price
from peagle.economics.prices import Price
from peagle.economics.report.figures import format_price
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineFacts
from peagle.engine.compile_cache import has_compiled_code
from peagle.engine.precision import Precision
from peagle.engine.response_parser import PARSER_KEYS, ResponseParser, check_parsers, has_parser
from peagle.engine.spec import EngineSpec
from peagle.engine.trials import check_schema
from peagle.engine_options import EngineOptions, ResolvedEngine, compose_fake_engine, footprint_of, resolve_engine
from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.hardware import Hardware
from peagle.profiles.watch import DrafterWatch
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec, resolve_prompts
from peagle.requests.sampling import SamplingLimits, conflict
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan
from pipelines.batch.config import GenerateConfig
from pipelines.batch.lender import Lender
from pipelines.batch.request import RunRequest
from pipelines.cluster.placement import Placement, place

# Compiling on a CPU takes 60 s, and saves 2.1 ms per token of SmolLM2-135M (0.27 GB): 78.2 instead of 67.4 output
# tokens/s (48 prompts of 128 tokens, EAGLE-3, K=3, 8 requests, `peagle generate --ignore-eos`, 2 busy cores of an AMD
# EPYC with AVX-512, 2026-11-28).
_CPU_COMPILING_S, _CPU_SAVED_S_PER_TOKEN_BYTE = 60.0, 2.1e-3 / 0.27e9  # per byte of weights
# On a GPU, compiling and capturing CUDA graphs take 68 s together (H200, shape of Qwen3-Coder-30B-A3B, no drafter).
# They save at most the whole time of an uncompiled step: 20 ms for SmolLM2-135M with 30 layers and its P-EAGLE head,
# which is 0.6 ms per layer (same GPU, shared with training; benchmarks/gpu/2026-11-27-h200-first-engines.md).
_GPU_COMPILING_S, _GPU_SAVED_S_PER_STEP_LAYER = 68.0, 0.6e-3


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A resolved bulk run. Picklable; every stage receives it.

    Attributes:
        directory: the run directory; it has the lease once the run is open.
        plan: the plan; stages on other nodes receive it without units (`for_stages`).
        engine: the engine, with model names that any node can resolve.
        placement: the resources of each engine.
        slot_group: name of the group of engines that share slot numbers on a node; None for a group of only this run.
        lender: None if the run starts its own engines.
    """

    config: GenerateConfig
    directory: RunDirectory
    plan: Plan
    hardware: Hardware
    engine: ResolvedEngine
    prompts: PromptSpec
    sampling: SamplingSpec
    price: Price
    placement: Placement
    slot_group: str | None = None
    lender: Lender | None = None

    @property
    def spec(self) -> EngineSpec:
        return self.engine.spec

    @property
    def precision(self) -> Precision:
        return self.engine.precision

    @property
    def model(self) -> ResolvedModel:
        return self.engine.model

    @property
    def drafter(self) -> ResolvedDrafter:
        """The drafter, or the reason for not using one."""
        return self.engine.drafter

    @property
    def baseline(self) -> Baseline | None:
        """Measured step times of the engine, or None."""
        return self.engine.baseline(self.hardware)

    @property
    def num_slots(self) -> int:
        """The maximum number of concurrent requests of an engine."""
        return self.lender.num_slots if self.lender else self.spec.max_num_seqs

    @property
    def concurrency(self) -> int:
        """Concurrent requests per engine, limited by its slots and by the number of rows."""
        rows_per_engine = math.ceil(self.plan.num_rows / self.config.engine_range.smallest)
        return min(self.spec.max_num_seqs, rows_per_engine)

    @property
    def facts(self) -> EngineFacts:
        """The facts that the ledger records about each engine of the run."""
        drafter = self.spec.drafter
        return EngineFacts.priced(
            self.price,
            model=self.model.name,
            drafter=self.drafter.name,
            num_devices=self.placement.num_devices,
            device=self.placement.device,
            tags=tags_to_text(self.config.tags),
            num_speculative_tokens=drafter.num_speculative_tokens if drafter else None,
            baseline=self.baseline,
            is_stand_in=self.config.engine == "fake",
        )

    @property
    def slot_group_name(self) -> str:
        """`slot_group`, or else the run's id as the name of its own group."""
        return self.slot_group or str(self.directory.manifest()["run_id"])

    def for_stages(self) -> "ResolvedRun":
        """Return the run without its units, of which there may be millions."""
        return replace(self, plan=replace(self.plan, units=()))

    def request_builder(self) -> RequestBuilder:
        """Return a builder that turns rows into engine requests."""
        tokenizer = tokenizer_of(_tokenizer_name(self.config, self.engine), self.spec.revision)
        return RequestBuilder(PromptBuilder(self.prompts, tokenizer, self.sampling.limits.max_model_len), self.sampling)

    def response_parser(self) -> ResponseParser | None:
        """Return the configured parser of responses, or None."""
        if not has_parser(self.config.model_dump()):
            return None
        return ResponseParser(
            tokenizer_of(self.spec.model, self.spec.revision),
            tool_call_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
        )

    def drafter_watch(self) -> DrafterWatch | None:
        """Return a new watch over the acceptance length; None without a drafter."""
        return self.engine.drafter_watch(self.hardware, self.spec.max_num_seqs)

    def describe(self) -> str:
        """Describe rows, model, hardware, drafter and price."""
        drafter = self.spec.drafter
        drafter_text = f"{self.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none"
        return (
            f"{self.plan.num_rows} rows; {self.model.name} on {self.hardware.describe()}, "
            f"{self.precision.describe()}\n"
            f"drafter: {drafter_text} ({self.drafter.note})\n"
            f"price: {format_price(self.price.to_dict())}"
        )

    def fingerprint(self, corpus_fingerprint: str) -> dict[str, Any]:
        """Return the settings that must be equal to continue this run."""
        drafter = self.spec.drafter
        engine_args = {**self.spec.extra, **self.config.engine_args}  # each of these may change responses
        return {
            "model": {"name": self.model.name, "weights": self.model.fingerprint},
            "drafter": {
                "name": self.drafter.name,
                "weights": self.drafter.fingerprint,
                "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
                # Omitted if off, so that older runs can be continued.
                **({"lookup": True} if drafter and drafter.lookup else {}),
            },
            "precision": self.precision.describe(),
            **({"engine_args": engine_args} if engine_args else {}),
            # Omitted without parsers, so that older runs can be continued.
            **{key: parser for key in PARSER_KEYS if (parser := getattr(self.config, key)) is not None},
            "max_model_len": self.spec.max_model_len,
            "sampling": {**self.sampling.base, "column": self.sampling.column},
            "prompts": self.prompts.to_dict(),
            "corpus": {"content": corpus_fingerprint, "limit": self.config.limit},
        }


def resolve(
    request: RunRequest,
    directory: RunDirectory,
    plan: Plan,
    hardware: Hardware,
    *,
    num_nodes: int = 1,
    announce: Callable[[str], None],
) -> ResolvedRun:
    """Resolve a planned run for nodes with known hardware. The nodes need not exist yet.

    Args:
        plan: the new or stored plan; until the lease is held, another driver may store another plan.
        hardware: hardware of a node.
        num_nodes: number of nodes among which the engines are divided.
        announce: called with a message before a slow step, such as converting a model.

    Raises:
        ConfigError: model, drafter, precision, price or prompts are invalid.
        CapacityError: the engines do not fit on the hardware.
    """
    config, columns, neighbours = request.config, plan.schema.names, request.neighbours
    placement = neighbours.placement if neighbours else place_engines(config, hardware, num_nodes)
    price = resolve_engine_price(config, hardware, placement)
    # An existing run keeps the commits (revisions) of its models.
    commits = EngineSpec.from_dict(directory.manifest()["engine"]).commits if directory.exists else request.commits
    engine = resolve_run_engine(config, hardware, placement, commits=commits, announce=announce)
    if not _is_worth_compiling(config, plan, hardware, engine):
        engine = replace(engine, spec=replace(engine.spec, enforce_eager=True))
        announce("not compiling the model, because this run is short (--no-enforce-eager compiles it)")
    check_parsers(config.model_dump())
    tokenizer = _tokenizer_name(config, engine)
    if tokenizer is not None and config.json_schema is not None and find_spec("xgrammar") is not None:
        check_schema(
            config.json_schema,
            model=local_model_path(tokenizer, engine.spec.revision, weights=False),
            revision=engine.spec.revision,
            vocab_size=engine.model.vocab_size,
        )
    return ResolvedRun(
        config=config,
        directory=directory,
        plan=plan,
        hardware=hardware,
        engine=engine,
        prompts=resolve_prompts(
            config,
            columns,
            bool(tokenizer_of(tokenizer, engine.spec.revision).chat_template),
            body_column="body" if plan.is_batch else None,
            where=f"input {config.input}",
        ),
        sampling=_resolve_sampling(config, hardware, engine, columns, plan.is_batch),
        price=price,
        placement=placement,
        slot_group=neighbours.slot_group if neighbours else None,
        lender=request.lender,
    )


def may_skip_compiling(options: EngineOptions, spec: EngineSpec) -> bool:
    """Return whether compiling may be skipped: no `enforce_eager` option, no cached code, no pipeline stages."""
    return (
        "enforce_eager" not in options.model_fields_set
        and options.pipeline_parallel_size == 1
        and not has_compiled_code(spec, os.environ)
    )


def _is_worth_compiling(config: GenerateConfig, plan: Plan, hardware: Hardware, engine: ResolvedEngine) -> bool:
    """Return whether compiling saves more time than it takes, or must not be skipped."""
    footprint, num_tokens = footprint_of(engine.model), plan.num_rows * config.max_tokens
    if config.engine == "fake" or footprint is None or not may_skip_compiling(config, engine.spec):
        return True
    if hardware.platform == "cpu":
        return num_tokens * footprint.weights_bytes * _CPU_SAVED_S_PER_TOKEN_BYTE > _CPU_COMPILING_S
    num_layers = footprint.num_layers + footprint.num_sliding_layers
    num_steps = num_tokens / min(plan.num_rows, engine.spec.max_num_seqs * config.engine_range.smallest)
    return num_steps * num_layers * _GPU_SAVED_S_PER_STEP_LAYER > _GPU_COMPILING_S


def _tokenizer_name(config: GenerateConfig, engine: ResolvedEngine) -> str | None:
    """Return the model whose tokenizer is used; None for the fake engine, whose tokens are bytes."""
    return None if config.engine == "fake" else engine.spec.model


def resolve_run_engine(
    config: GenerateConfig,
    hardware: Hardware,
    placement: Placement,
    *,
    commits: Mapping[str, str] = NO_COMMITS,
    announce: Callable[[str], None],
) -> ResolvedEngine:
    """Resolve the engine of a run.

    Raises:
        PeagleError: see `resolve`.
    """
    if config.engine == "fake":
        return compose_fake_engine(config, hardware)
    return resolve_engine(
        config,
        hardware,
        num_engines_on_node=placement.num_engines_on_node,
        num_nodes=config.nodes_per_engine,
        commits=commits,
        announce=announce,
    )


def resolve_engine_price(config: GenerateConfig, hardware: Hardware, placement: Placement) -> Price:
    """Resolve the price of the devices that the engines use.

    Raises:
        PriceError: the price is unknown, or is for other devices.
    """
    price = resolve_price(config, hardware)
    require_device(price, placement.device, engines="engines here")
    return price


def place_engines(config: GenerateConfig, hardware: Hardware, num_nodes: int) -> Placement:
    """Return the resources of each engine.

    Raises:
        CapacityError: the engines do not fit on the nodes.
    """
    # Fake engines are not bound to physical cores, so there can be one for each logical CPU.
    node = replace(hardware, core_ids=()) if config.engine == "fake" else hardware
    return place(
        node,
        num_engines=config.engine_range.smallest,
        accelerators_per_engine=config.accelerators_per_engine,
        num_nodes=num_nodes,
        nodes_per_engine=config.nodes_per_engine,
        max_engines=config.engine_range.largest,
        accelerator_type=config.accelerator_type,
    )


def _resolve_sampling(
    config: GenerateConfig, hardware: Hardware, engine: ResolvedEngine, columns: list[str], is_batch: bool
) -> SamplingSpec:
    """Return the run's sampling parameters and the column with the rows' own parameters.

    Raises:
        ConfigError: the engine does not support the parameters.
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
    if message := conflict(config.sampling(), limits):
        raise ConfigError(message)
    column = config.sampling_column
    if is_batch and column is not None:
        raise ConfigError("sampling_column cannot be used with an OpenAI batch: each body has its own parameters")
    if column is None and not is_batch:
        column = "sampling" if "sampling" in columns else None
    elif column == "none":
        column = None
    elif column is not None and column not in columns:
        raise InputError(f"input {config.input} has no column {column!r}", hint=did_you_mean(column, columns))
    return SamplingSpec(
        base=config.sampling(),
        column=column,
        limits=limits,
        has_tool_parser=config.tool_call_parser is not None,
        has_parser=has_parser(config.model_dump()),
    )
