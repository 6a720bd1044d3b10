"""Forecast of a bulk run, for `peagle generate --dry-run`.

It uses the same functions as a run, for the configured machine or this one. It starts and writes nothing, and does not
connect to Ray.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from peagle.economics.machines import machine_for
from peagle.economics.price_options import settled_price
from peagle.economics.prices import Price
from peagle.economics.report.figures import in_words_count, in_words_s, in_words_usd, price_in_words
from peagle.engine.memory import Footprint, default_kv_cache_gib, gpu_need, read_footprint
from peagle.engine.spec import EngineSpec
from peagle.engine_options import FAKE_MODEL, ResolvedEngine, Settled, footprint_of, settled_keys
from peagle.hardware import Hardware
from peagle.planning.expectation import Speed, known_speed
from peagle.runs.directory import RunDirectory
from peagle.runs.prepare import CorpusSample, PrepareJob, sample_corpus
from pipelines.batch.config import GenerateConfig
from pipelines.batch.decide import Decided, decided_on, planned, require_run_fits
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import resolve_machines
from pipelines.cluster import ray
from pipelines.cluster.placement import Placement, num_engine_nodes

Lines = list[tuple[str, str]]
UNKNOWN_SPEED = "unknown: no measurement or publication of this engine on this hardware (`peagle tune` measures it)"


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What a run would do.

    Attributes:
        is_here: the engines would run on this machine, whose hardware was detected.
        num_rows_left: of an existing run; of a new run, all rows.
        speed: None where unknown field.
    """

    decided: Decided
    is_here: bool
    num_nodes: int
    num_rows_left: int
    sample: CorpusSample
    speed: Speed | None
    memory: str

    @property
    def num_engines(self) -> int:
        """The number of engines at the start."""
        return self.decided.request.config.engine_range.smallest

    @property
    def usd_per_h(self) -> float:
        """The price of an hour of these engines."""
        resolved = self.decided.resolved
        return resolved.price.usd_per_device_s * 3600 * resolved.placement.num_devices * self.num_engines

    @property
    def most_s(self) -> float | None:
        """Seconds of generation with answers of maximum length; None if the speed is unknown."""
        if self.speed is None:
            return None
        left = self.num_rows_left / self.sample.num_rows
        return left * self.sample.most_output_tokens / self.speed.tokens_per_s / self.num_engines

    def lines(self) -> Lines:
        """Return the forecast as pairs of label and text."""
        decided, config = self.decided, self.decided.request.config
        resolved, plan = decided.resolved, decided.plan
        is_new = not decided.directory.exists
        drafter = resolved.spec.drafter
        return [
            ("run", f"{decided.directory}: " + ("new" if is_new else f"continues, {self.num_rows_left:,} rows left")),
            ("rows", f"{plan.num_rows:,} in {len(plan.units):,} units"),
            *[("note", note) for note in plan.notes],
            ("prompts", _prompts(self.sample)),
            ("answers", f"at most {in_words_count(self.sample.most_output_tokens)} tokens in all"),
            ("model", f"{resolved.model.name}, {resolved.precision.describe()}, context {resolved.spec.max_model_len}"),
            (
                "drafter",
                (f"{resolved.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none")
                + f" ({resolved.drafter.note})",
            ),
            ("machine", machine_in_words(resolved.hardware, self.is_here, self.num_nodes)),
            (
                "engines",
                f"{config.engines} of {devices_of(resolved.placement)}, {decided.concurrency} requests at once in each",
            ),
            ("memory", self.memory),
            ("price", price_in_words(resolved.price.to_dict())),
            ("engines cost", f"{in_words_usd(self.usd_per_h)} an hour{doubt_of(resolved.price)}"),
            ("expected", self._expected()),
            *_limits(config, self.usd_per_h),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        resolved = self.decided.resolved
        most_s = self.most_s
        return {
            "rows": self.decided.plan.num_rows,
            "notes": list(self.decided.plan.notes),
            "rows_left": self.num_rows_left,
            "prompt_tokens": round(self.sample.prompt_tokens),
            "most_output_tokens": round(self.sample.most_output_tokens),
            "sampled_rows": self.sample.num_sampled,
            "sampled_dead_letters": self.sample.num_failed,
            "model": resolved.model.name,
            "drafter": resolved.drafter.name,
            "num_speculative_tokens": resolved.spec.drafter.num_speculative_tokens if resolved.spec.drafter else None,
            "precision": resolved.precision.describe(),
            "hardware": resolved.hardware.to_dict(),
            "is_here": self.is_here,
            "engines": self.num_engines,
            "concurrency": self.decided.concurrency,
            "memory": self.memory,
            "price": resolved.price.to_dict(),
            "usd_per_h": self.usd_per_h,
            "speed": self.speed.describe() if self.speed else None,
            "most_s": most_s,
            "most_usd": None if most_s is None else most_s / 3600 * self.usd_per_h,
        }

    def _expected(self) -> str:
        if self.num_rows_left == 0:
            return "nothing is left to do"
        if self.speed is None or self.most_s is None:
            return UNKNOWN_SPEED
        usd = in_words_usd(self.most_s / 3600 * self.usd_per_h)
        return (
            f"at most {in_words_s(self.most_s)} and {usd} once engines are up, with answers as long as they may be: "
            f"{self.speed.describe()}"
        )


def forecast(request: RunRequest, announce: Callable[[str], None]) -> RunForecast:
    """Resolve a run without starting it.

    Args:
        announce: called before something slow.

    Raises:
        PeagleError: the run would be refused.
    """
    config = request.config
    directory = RunDirectory(config.output)
    require_run_fits(request, directory)
    here, is_here, num_nodes = _machines(config)
    plan = planned(request, directory, here.platform)
    decided = decided_on(request, directory, plan, here, num_nodes=num_nodes, announce=announce)
    resolved = decided.resolved
    left = plan.left(directory.committed()) if directory.exists else plan.units
    job = PrepareJob(
        run_dir=str(directory),
        model=resolved.tokenizer,
        prompts=resolved.prompts,
        sampling=resolved.sampling,
        schema=plan.schema,
        revision=resolved.spec.revision,
    )
    return RunForecast(
        decided=decided,
        is_here=is_here,
        num_nodes=num_nodes,
        num_rows_left=sum(unit.num_rows for unit in left),
        sample=sample_corpus(plan, job),
        speed=known_speed(resolved.engine, here, decided.concurrency),
        memory=memory_of(resolved.engine, here, resolved.placement),
    )


def settled(config: GenerateConfig) -> Settled:
    """Return values for the keys that the configuration does not set.

    Raises:
        PeagleError: the run would be refused before its corpus is read.
    """
    here, is_here, num_nodes = _machines(config)
    machines = resolve_machines(config, here, num_nodes=num_nodes, announce=print)
    return settled_keys(config, machines.engine, here, is_here=is_here) | settled_price(config, machines.price)


def _machines(config: GenerateConfig) -> tuple[Hardware, bool, int]:
    """Return the hardware of the engines, whether it is this machine, and the number of nodes."""
    per_node = config.accelerators_per_engine // config.nodes_per_engine
    here, is_here = machine_for(config, config.accelerator_type, num_accelerators=per_node)
    num_nodes = num_engine_nodes(
        [],
        here,
        num_engines=config.engine_range.smallest,
        accelerators_per_engine=config.accelerators_per_engine,
        nodes_per_engine=config.nodes_per_engine,
    )
    return here, is_here, num_nodes


def memory_of(engine: ResolvedEngine, here: Hardware, placement: Placement) -> str:
    """Describe the memory of an engine."""
    if engine.model is FAKE_MODEL:
        return "none: no model is loaded"
    return memory_in_words(
        replace(engine.spec, model=engine.model.path),
        here,
        footprint_of(engine.model),
        num_engines_on_node=placement.num_engines_on_node,
    )


def _prompts(found: CorpusSample) -> str:
    mean = found.prompt_tokens / found.num_rows
    how = "all rows" if found.is_whole else f"{found.num_sampled:,} rows sampled"
    failed = f"; {found.num_failed:,} of them would be dead letters ({found.example})" if found.num_failed else ""
    about = "" if found.is_whole else "about "
    return f"{about}{in_words_count(found.prompt_tokens)} tokens, {mean:,.0f} a row ({how}{failed})"


def machine_in_words(here: Hardware, is_here: bool, num_nodes: int) -> str:
    """Describe the machine of the engines."""
    if not is_here:
        return f"{here.describe()}; {num_nodes} of these machines, as the tables have them"
    unasked = "; the cluster of RAY_ADDRESS is not asked: name its instance_type" if ray.is_remote() else ""
    return f"{here.describe()}; this machine{unasked}"


def devices_of(placement: Placement) -> str:
    """Describe the devices of an engine."""
    return f"{placement.num_devices} {placement.device}{'s' if placement.num_devices > 1 else ''}"


def doubt_of(price: Price) -> str:
    """Return why the price may be wrong, in parentheses, or an empty string."""
    return f" (the price may be wrong: {price.doubt})" if price.doubt else ""


def _limits(config: GenerateConfig, usd_per_h: float) -> Lines:
    if config.budget_usd is None:
        return []
    hours = in_words_s(config.budget_usd / usd_per_h * 3600)
    return [("budget", f"{in_words_usd(config.budget_usd)} pays these engines for {hours}")]


def memory_in_words(
    spec: EngineSpec, hardware: Hardware, known: Footprint | None, *, num_engines_on_node: int = 1
) -> str:
    """Describe the memory of an engine that passed `check_capacity`.

    Args:
        spec: with the folder of the model, if it is on this disk.
        known: otherwise, the footprint of the model.
    """
    footprint = read_footprint(spec.model) or known
    if footprint is None:
        return "not known: config.json does not say enough"
    if hardware.platform == "cpu":
        cache_gib = spec.kv_cache_gib or default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
        return f"fits by estimate, with a KV cache of {cache_gib:.1f} GiB; {hardware.free_memory_gib:.1f} GiB are free"
    need = gpu_need(spec, hardware, footprint)
    return (
        f"about {need.total_gib:.1f} of {need.available_gib:.1f} GiB (weights {need.weights_gib:.1f}, KV cache of one "
        f"request {need.kv_cache_gib:.1f}, a step {need.step_gib:.1f}, CUDA graphs {need.graphs_gib:.1f})"
    )
