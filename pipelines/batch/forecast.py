"""Forecast of a bulk run, for `peagle generate --dry-run`.

The forecast uses the same functions as a run, for the configured machine or for this machine. It starts and writes
nothing, and does not connect to Ray.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from peagle.economics.price_options import configured_or_local_machine, resolve_price_defaults
from peagle.economics.prices import Price
from peagle.economics.report.figures import format_count, format_duration, format_price, format_usd
from peagle.engine.memory import Footprint, default_kv_cache_gib, gpu_need, read_footprint
from peagle.engine.spec import EngineSpec
from peagle.engine_options import FAKE_MODEL, ResolvedDefaults, ResolvedEngine, footprint_of, resolve_defaults
from peagle.hardware import Hardware
from peagle.planning.expectation import Speed, known_speed
from peagle.runs.directory import RunDirectory
from peagle.runs.prepare import CorpusSample, sample_corpus
from pipelines.batch.config import GenerateConfig
from pipelines.batch.decide import require_run_fits, stored_or_new_plan
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import ResolvedRun, place_engines, resolve, resolve_engine_price, resolve_run_engine
from pipelines.cluster import ray
from pipelines.cluster.placement import Placement, num_engine_nodes

Lines = list[tuple[str, str]]
UNKNOWN_SPEED = "unknown: no measured or published speed of this engine on this hardware (`peagle tune` measures it)"


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """A description of what `peagle generate` would do.

    Attributes:
        run: the resolved run, which has not been created.
        is_for_this_machine: whether the engines would run on this machine, whose hardware was detected.
        num_rows_left: remaining rows of an existing run; all rows of a new run.
        speed: expected speed; None if unknown.
    """

    run: ResolvedRun
    is_for_this_machine: bool
    num_nodes: int
    num_rows_left: int
    sample: CorpusSample
    speed: Speed | None
    memory: str

    @property
    def num_engines(self) -> int:
        """The number of engines at the start."""
        return self.run.config.engine_range.smallest

    @property
    def usd_per_h(self) -> float:
        """The hourly cost of the engines at the start."""
        return self.run.price.usd_per_device_s * 3600 * self.run.placement.num_devices * self.num_engines

    @property
    def max_generation_s(self) -> float | None:
        """Seconds of generation if every answer has the maximum length; None if the speed is unknown."""
        if self.speed is None:
            return None
        share_left = self.num_rows_left / self.sample.num_rows
        return share_left * self.sample.max_output_tokens / self.speed.tokens_per_s / self.num_engines

    def lines(self) -> Lines:
        """Return the forecast as pairs of label and text."""
        run, config, plan, drafter = self.run, self.run.config, self.run.plan, self.run.spec.drafter
        is_new = not run.directory.exists
        return [
            ("run", f"{run.directory}: " + ("new" if is_new else f"continues, {self.num_rows_left:,} rows left")),
            ("rows", f"{plan.num_rows:,} in {len(plan.units):,} units"),
            *[("note", note) for note in plan.notes],
            ("prompts", _describe_prompts(self.sample)),
            ("answers", f"at most {format_count(self.sample.max_output_tokens)} tokens in total"),
            ("model", f"{run.model.name}, {run.precision.describe()}, context {run.spec.max_model_len}"),
            (
                "drafter",
                (f"{run.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none")
                + f" ({run.drafter.note})",
            ),
            ("machine", describe_machine(run.hardware, self.is_for_this_machine, self.num_nodes)),
            (
                "engines",
                f"{config.engines} of {describe_devices(run.placement)}, {run.concurrency} concurrent requests in each",
            ),
            ("memory", self.memory),
            ("price", format_price(run.price.to_dict())),
            ("engines cost", f"{format_usd(self.usd_per_h)} an hour{price_warning(run.price)}"),
            ("expected", self._expected()),
            *_budget_lines(config, self.usd_per_h),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        run = self.run
        max_generation_s = self.max_generation_s
        return {
            "rows": run.plan.num_rows,
            "notes": list(run.plan.notes),
            "rows_left": self.num_rows_left,
            "prompt_tokens": round(self.sample.prompt_tokens),
            "max_output_tokens": round(self.sample.max_output_tokens),
            "sampled_rows": self.sample.num_sampled,
            "sampled_dead_letters": self.sample.num_failed,
            "model": run.model.name,
            "drafter": run.drafter.name,
            "num_speculative_tokens": run.spec.drafter.num_speculative_tokens if run.spec.drafter else None,
            "precision": run.precision.describe(),
            "hardware": run.hardware.to_dict(),
            "is_here": self.is_for_this_machine,
            "engines": self.num_engines,
            "concurrency": run.concurrency,
            "memory": self.memory,
            "price": run.price.to_dict(),
            "usd_per_h": self.usd_per_h,
            "speed": self.speed.describe() if self.speed else None,
            "most_s": max_generation_s,
            "most_usd": None if max_generation_s is None else max_generation_s / 3600 * self.usd_per_h,
        }

    def _expected(self) -> str:
        if self.num_rows_left == 0:
            return "nothing is left to do"
        if self.speed is None or self.max_generation_s is None:
            return UNKNOWN_SPEED
        usd = format_usd(self.max_generation_s / 3600 * self.usd_per_h)
        return (
            f"at most {format_duration(self.max_generation_s)} and {usd} once engines are up, if every answer has the "
            f"maximum length: {self.speed.describe()}"
        )


def forecast(request: RunRequest, announce: Callable[[str], None]) -> RunForecast:
    """Resolve a run without starting it.

    Args:
        announce: called with a message before a slow step.

    Raises:
        PeagleError: the run would be refused.
    """
    config = request.config
    directory = RunDirectory(config.output)
    require_run_fits(request, directory)
    hardware, is_for_this_machine, num_nodes = _engine_hardware(config)
    plan = stored_or_new_plan(request, directory, hardware.platform)
    run = resolve(request, directory, plan, hardware, num_nodes=num_nodes, announce=announce)
    units_left = plan.remaining_units(directory.committed()) if directory.exists else plan.units
    return RunForecast(
        run=run,
        is_for_this_machine=is_for_this_machine,
        num_nodes=num_nodes,
        num_rows_left=sum(unit.num_rows for unit in units_left),
        sample=sample_corpus(plan, run.request_builder()),
        speed=known_speed(run.engine, hardware, run.concurrency),
        memory=describe_engine_memory(run.engine, hardware, run.placement),
    )


def resolve_unset_options(config: GenerateConfig) -> ResolvedDefaults:
    """Return values for the options that the configuration does not set.

    Raises:
        PeagleError: the run would be refused before its corpus is read.
    """
    hardware, is_for_this_machine, num_nodes = _engine_hardware(config)
    placement = place_engines(config, hardware, num_nodes)
    price = resolve_engine_price(config, hardware, placement)
    engine = resolve_run_engine(config, hardware, placement, announce=print)
    return resolve_defaults(config, engine, hardware, is_for_this_machine=is_for_this_machine) | resolve_price_defaults(
        config, price
    )


def _engine_hardware(config: GenerateConfig) -> tuple[Hardware, bool, int]:
    """Return the engines' hardware, whether it belongs to this machine, and the number of nodes."""
    accelerators_per_node = config.accelerators_per_engine // config.nodes_per_engine
    hardware, is_for_this_machine = configured_or_local_machine(
        config, config.accelerator_type, num_accelerators=accelerators_per_node
    )
    num_nodes = num_engine_nodes(
        [],  # the nodes are unknown, since Ray is not asked
        hardware,
        num_engines=config.engine_range.smallest,
        accelerators_per_engine=config.accelerators_per_engine,
        nodes_per_engine=config.nodes_per_engine,
    )
    return hardware, is_for_this_machine, num_nodes


def describe_engine_memory(engine: ResolvedEngine, hardware: Hardware, placement: Placement) -> str:
    if engine.model is FAKE_MODEL:
        return "none: no model is loaded"
    return describe_memory(
        replace(engine.spec, model=engine.model.path),
        hardware,
        footprint_of(engine.model),
        num_engines_on_node=placement.num_engines_on_node,
    )


def _describe_prompts(sample: CorpusSample) -> str:
    mean = sample.prompt_tokens / sample.num_rows
    rows = "all rows" if sample.is_whole else f"{sample.num_sampled:,} rows sampled"
    failed = f"; {sample.num_failed:,} of them would be dead letters ({sample.example})" if sample.num_failed else ""
    about = "" if sample.is_whole else "about "
    return f"{about}{format_count(sample.prompt_tokens)} tokens, {mean:,.0f} per row ({rows}{failed})"


def describe_machine(hardware: Hardware, is_for_this_machine: bool, num_nodes: int) -> str:
    if not is_for_this_machine:
        return f"{hardware.describe()}; {num_nodes} of these machines, not inspected"
    note = "; the cluster of RAY_ADDRESS was not inspected: set its instance_type" if ray.is_remote() else ""
    return f"{hardware.describe()}; this machine{note}"


def describe_devices(placement: Placement) -> str:
    return f"{placement.num_devices} {placement.device}{'s' if placement.num_devices > 1 else ''}"


def price_warning(price: Price) -> str:
    """Return why the price might be wrong, in parentheses, or an empty string."""
    return f" (the price might be wrong: {price.doubt})" if price.doubt else ""


def _budget_lines(config: GenerateConfig, usd_per_h: float) -> Lines:
    if config.budget_usd is None:
        return []
    hours = format_duration(config.budget_usd / usd_per_h * 3600)
    return [("budget", f"{format_usd(config.budget_usd)} pays for {hours} of these engines")]


def describe_memory(
    spec: EngineSpec, hardware: Hardware, fallback: Footprint | None, *, num_engines_on_node: int = 1
) -> str:
    """Describe the memory of an engine that passed `check_capacity`.

    Args:
        spec: `spec.model` is the model's folder if it is on this disk.
        fallback: the model's footprint, if its folder is not on this disk.
    """
    footprint = read_footprint(spec.model) or fallback
    if footprint is None:
        return "unknown: config.json is incomplete"
    if hardware.platform == "cpu":
        cache_gib = spec.kv_cache_gib or default_kv_cache_gib(spec, hardware, num_engines_on_node=num_engines_on_node)
        return f"fits by estimate, with a KV cache of {cache_gib:.1f} GiB; {hardware.free_memory_gib:.1f} GiB are free"
    need = gpu_need(spec, hardware, footprint)
    return (
        f"about {need.total_gib:.1f} of {need.available_gib:.1f} GiB (weights {need.weights_gib:.1f}, KV cache of one "
        f"request {need.kv_cache_gib:.1f}, a step {need.step_gib:.1f}, CUDA graphs {need.graphs_gib:.1f})"
    )
