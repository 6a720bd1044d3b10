"""From what a user asked for to what will run: model, drafter, K, precision, price, placement.

Everything that can be refused is refused here, before an engine starts. It starts nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from peagle.catalog.resolve import (
    ResolvedDrafter,
    ResolvedModel,
    max_model_len,
    resolve_drafter,
    resolve_model,
)
from peagle.economics.prices import Price, PriceTable, default_instance
from peagle.engine.memory import check_capacity
from peagle.engine.precision import Precision, resolve_precision
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.hardware import Hardware
from peagle.prompting import PromptSpec, resolve_prompts
from peagle.requests import SamplingSpec
from peagle.sampling import SamplingLimits, conflict
from pipelines.batch.cluster import Placement, place
from pipelines.batch.config import GenerateConfig
from pipelines.batch.preparing import load_tokenizer

DEFAULT_MAX_NUM_SEQS = {"cpu": 8, "cuda": 256}
# Rows and reports must never name a model that did not answer.
_FAKE_MODEL = ResolvedModel(
    name="fake", path="fake", card=None, fingerprint="fake", config={"max_position_embeddings": 8192}
)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """Everything that a run is, decided.

    Attributes:
        spec: the engine, its models by names that any node can resolve.
        precision: what the engine computes in on this hardware.
        tokenizer: the model whose tokenizer is used; None for the fake engine's bytes.
        placement: what each engine takes of the cluster.
    """

    config: GenerateConfig
    hardware: Hardware
    spec: EngineSpec
    precision: Precision
    model: ResolvedModel
    drafter: ResolvedDrafter
    tokenizer: str | None
    prompts: PromptSpec
    sampling: SamplingSpec
    price: Price
    placement: Placement

    def fingerprint(self, corpus: str) -> dict[str, Any]:
        """What must be equal for another attempt to continue this run."""
        drafter = self.spec.drafter
        return {
            "model": {"name": self.model.name, "weights": self.model.fingerprint},
            "drafter": {
                "name": self.drafter.name,
                "weights": self.drafter.fingerprint,
                "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
            },
            "precision": self.precision.describe(),
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
    announce: Callable[[str], None],
) -> ResolvedRun:
    """Decide everything.

    Args:
        columns: of the corpus.
        is_batch: whether the corpus is an OpenAI batch.
        announce: told what takes long, such as converting a model.

    Raises:
        ConfigError: of the kind that fits (model, drafter, precision, price, prompts).
        CapacityError: the hardware cannot hold the engines.
    """
    placement = place(
        hardware,
        num_engines=config.engines,
        accelerators_per_engine=config.tensor_parallel_size,
        num_nodes=num_nodes,
    )
    price = resolve_price(config, hardware)
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[hardware.platform]
    if config.engine == "fake":
        model, drafter = _FAKE_MODEL, _fake_drafter(config)
    else:
        model = resolve_model(config.model, announce=announce)
        drafter = resolve_drafter(
            config.drafter,
            model,
            max_num_seqs,
            num_speculative_tokens=config.num_speculative_tokens,
            platform=hardware.platform,
        )
    spec = _spec(config, model, drafter, max_num_seqs)
    if config.engine == "vllm":
        check_capacity(spec, hardware, num_engines_on_node=placement.num_engines_on_node)
    reference = _reference(config, model)
    tokenizer = None if config.engine == "fake" else reference
    return ResolvedRun(
        config=config,
        hardware=hardware,
        spec=replace(spec, model=reference),
        precision=resolve_precision(spec.precision, hardware, native_quantization=spec.native_quantization),
        model=model,
        drafter=drafter,
        tokenizer=tokenizer,
        prompts=resolve_prompts(
            config,
            columns,
            bool(load_tokenizer(tokenizer).chat_template),
            body_column="body" if is_batch else None,
            where=f"input {config.input}",
        ),
        sampling=_sampling(config, hardware, spec, columns, is_batch),
        price=price,
        placement=placement,
    )


def resolve_price(config: GenerateConfig, hardware: Hardware) -> Price:
    """The price of the hardware.

    Raises:
        PriceError: there is none; it is never taken to be zero.
    """
    if config.usd_per_hour is not None:
        on_gpu = hardware.platform == "cuda"
        return Price.fixed(
            usd_per_hour=config.usd_per_hour,
            device="accelerator" if on_gpu else "vcpu",
            num_devices=hardware.num_accelerators if on_gpu else hardware.num_cpus,
        )
    table = PriceTable.load(config.prices)
    instance = config.instance_type or default_instance(hardware.accelerator, table)
    return table.price(instance, market=config.market, provider=config.provider, region=config.region)


def _spec(config: GenerateConfig, model: ResolvedModel, drafter: ResolvedDrafter, max_num_seqs: int) -> EngineSpec:
    return EngineSpec(
        model=model.path,
        drafter=drafter.spec,
        precision=config.precision,
        native_quantization=model.native_quantization,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len(model, config.max_model_len),
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=config.enforce_eager,
        kv_cache_gib=config.kv_cache_gib,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )


def _sampling(
    config: GenerateConfig, hardware: Hardware, spec: EngineSpec, columns: list[str], is_batch: bool
) -> SamplingSpec:
    """The run's parameters, and where rows have their own.

    Raises:
        ConfigError: the engine would not take them.
        InputError: the column that is named is not in the corpus.
    """
    assert spec.max_model_len is not None, "_spec() sets it"
    limits = SamplingLimits(
        max_model_len=spec.max_model_len,
        has_drafter=spec.drafter is not None,
        can_seed=hardware.platform != "cpu" or config.engine == "fake",
    )
    if wrong := conflict(config.sampling(), limits):
        raise ConfigError(wrong)
    column = config.sampling_column
    if is_batch and column is not None:
        raise ConfigError("sampling_column means nothing for an OpenAI batch: each body has its own parameters")
    if column is None and not is_batch:
        column = "sampling" if "sampling" in columns else None
    elif column == "none":
        column = None
    elif column is not None and column not in columns:
        raise InputError(f"input {config.input} has no column {column!r}", hint=did_you_mean(column, columns))
    return SamplingSpec(base=config.sampling(), column=column, limits=limits)


def _reference(config: GenerateConfig, model: ResolvedModel) -> str:
    """What any node can resolve: a packaged model's name (each node converts its own), else its folder or hub id."""
    is_packaged = model.card is not None and model.card.source.kind == "package"
    return config.model if is_packaged else model.path


def _fake_drafter(config: GenerateConfig) -> ResolvedDrafter:
    if config.drafter not in ("auto", "none"):
        raise ConfigError(
            "engine: fake loads no drafter", hint="leave drafter out, and give num_speculative_tokens alone"
        )
    k = config.num_speculative_tokens
    spec = DrafterSpec(method="peagle", model="fake", num_speculative_tokens=k) if k else None
    note = "engine: fake; no model answers, and its speed means nothing"
    return ResolvedDrafter(spec=spec, name="fake" if k else None, note=note, fingerprint="fake" if k else None)
