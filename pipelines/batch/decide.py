"""The decisions of a run: hardware, plan, engine, placement, price.

Nothing is written and nothing is bought yet, but what a run cannot do without may be waited for: an autoscaled cluster
is asked for accelerators of the kind that is wanted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from peagle import hardware
from peagle.economics.price_options import require_price
from peagle.economics.report.figures import price_in_words
from peagle.engine.spec import EngineSpec
from peagle.engine_options import DEFAULT_MAX_NUM_SEQS
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from peagle.machine import identified
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, make_plan
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import ResolvedRun, resolve
from pipelines.cluster import inspection, ray
from pipelines.cluster.connection import Connection
from pipelines.cluster.placement import on_accelerators

_NO_RUN = "leave --retry-failed out to start one"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A run that may begin or go on, as far as could be told without its lease.

    Attributes:
        plan: made, or read; another driver may write down its own before this one has the lease.
    """

    request: RunRequest
    directory: RunDirectory
    plan: Plan
    resolved: ResolvedRun

    @property
    def concurrency(self) -> int:
        """Requests in an engine at once, as many as it takes and there are rows for."""
        rows_per_engine = math.ceil(self.plan.num_rows / self.request.config.engine_range.smallest)
        return min(self.resolved.spec.max_num_seqs, rows_per_engine)

    def describe(self) -> str:
        """Rows, model, hardware, drafter and price, for people."""
        resolved, drafter = self.resolved, self.resolved.spec.drafter
        name = f"{resolved.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none"
        return (
            f"{self.plan.num_rows} rows; {resolved.model.name} on {resolved.hardware.describe()}, "
            f"{resolved.precision.describe()}\n"
            f"drafter: {name} ({resolved.drafter.note})\n"
            f"price: {price_in_words(resolved.price.to_dict())}"
        )


def decide(request: RunRequest, cluster: Connection, announce: Callable[[str], None]) -> Decided:
    """Decide everything that a run is.

    Args:
        announce: told what takes long, and what was decided.

    Raises:
        PeagleError: of the kind that fits; `resolve` and `hardware_for` list them.
    """
    directory = RunDirectory(request.config.output)
    _require_sense(request, directory, cluster)
    cluster.prepare()
    here, plan = _hardware_and_plan(request, directory, announce)
    num_nodes = _num_nodes(request, here) if cluster.is_remote else 1
    decided = decided_on(request, directory, plan, here, num_nodes=num_nodes, announce=announce)
    announce(decided.describe())
    for note in decided.resolved.engine.profile_notes(here):
        announce(note)
    return decided


def decided_on(
    request: RunRequest,
    directory: RunDirectory,
    plan: Plan,
    here: Hardware,
    *,
    num_nodes: int,
    announce: Callable[[str], None],
) -> Decided:
    """Decide a planned run for nodes that are known, whether they are there or not.

    Args:
        here: the hardware of a node.
        num_nodes: among which engines are divided.

    Raises:
        PeagleError: of the kind that fits; `resolve` lists them.
    """
    resolved = resolve(
        request.config,
        here,
        plan.schema.names,
        is_batch=plan.is_batch,
        num_nodes=num_nodes,
        neighbours=request.neighbours,
        commits=EngineSpec.from_dict(directory.manifest()["engine"]).commits if directory.exists else request.commits,
        announce=announce,
    )
    resolved = replace(resolved, lender=request.lender)
    return Decided(request=request, directory=directory, plan=plan, resolved=resolved)


def _require_sense(request: RunRequest, directory: RunDirectory, cluster: Connection) -> None:
    """Refuse what needs no cluster to be refused.

    Raises:
        ConfigError: the directory cannot hold this run, or holds none to take up; or there is but one node.
    """
    config = request.config
    directory.require_usable()
    require_run_fits(request, directory)
    if config.nodes_per_engine > 1 and not cluster.is_remote:
        raise ConfigError(
            f"nodes_per_engine {config.nodes_per_engine}: RAY_ADDRESS names no cluster, so there is one node",
            hint="set RAY_ADDRESS to a cluster's address, or leave --nodes-per-engine out",
        )


def require_run_fits(request: RunRequest, directory: RunDirectory) -> None:
    """Refuse a directory that cannot hold this run, or holds none to take up.

    Raises:
        ConfigError: as it says.
    """
    directory.require_own()
    if request.config.retry_failed and not directory.exists:
        raise ConfigError(f"{directory} holds no run whose failed rows could be taken up again", hint=_NO_RUN)


# --- the plan


def _hardware_and_plan(
    request: RunRequest, directory: RunDirectory, announce: Callable[[str], None]
) -> tuple[Hardware, Plan]:
    """A node's hardware and the plan: whichever is there without waiting comes first.

    A wrong input is told before accelerators are waited for; how a corpus is cut depends on the nodes otherwise.
    """
    if directory.exists or request.config.accelerator_type:
        plan = planned(request, directory, "cuda")
        return hardware_for(request, directory, announce), plan
    here = hardware_for(request, directory, announce)
    return here, planned(request, directory, here.platform)


def planned(request: RunRequest, directory: RunDirectory, platform: Literal["cpu", "cuda"]) -> Plan:
    """The plan that is written down, or a new one.

    Args:
        platform: of the nodes, for a new one.

    Raises:
        InputError: the corpus cannot be read, or holds no row.
    """
    if directory.exists:
        return directory.plan()
    return make_plan(request.config, max_num_seqs=DEFAULT_MAX_NUM_SEQS[platform])


def planned_again(request: RunRequest, directory: RunDirectory) -> Plan:
    """The corpus as it is now, cut as it is written down.

    The units of retries are not in it.

    Raises:
        InputError: the corpus cannot be read, or holds no row.
    """
    written = directory.plan()
    return make_plan(request.config, written.cut, like=written.corpus_fingerprint)


# --- the hardware


def hardware_for(request: RunRequest, directory: RunDirectory, announce: Callable[[str], None]) -> Hardware:
    """The hardware of a node that will run the engines.

    A finished run needs none, so it keeps the one that it had.

    Raises:
        ConfigError: the run began on other hardware than it asks for now.
        CapacityError: no such node comes.
        StoppedEarly: a stop or the deadline ended the wait for one.
    """
    if request.neighbours is not None:
        return request.neighbours.hardware
    return _finished_on(request, directory) or _look(request, announce)


def _finished_on(request: RunRequest, directory: RunDirectory) -> Hardware | None:
    """The accelerators that a finished run had.

    It need not wait for others to find that nothing is left to do.

    None where something may be left, or where nobody would wait: then somebody has to look at what is there.

    Raises:
        ConfigError: the run began on CPUs, so accelerators would be waited for in vain.
    """
    config = request.config
    if config.accelerator_type is None or not directory.exists:
        return None
    before = Hardware.from_dict(directory.manifest()["run"]["hardware"])
    if before.platform != "cuda":
        raise ConfigError(
            f"{directory} began on {before.describe()}: accelerator_type {config.accelerator_type} cannot continue it",
            hint="leave --accelerator-type out, or begin another run with another --output",
        )
    if directory.plan().left(directory.committed()):
        return None
    may_retry = config.retry_failed and any(usage.num_failed_rows for usage in directory.usages())
    return None if may_retry else before


def _look(request: RunRequest, announce: Callable[[str], None]) -> Hardware:
    """The hardware of this node, or of one of the cluster's, for the engines.

    Where engines need accelerators, an autoscaled cluster is asked for them first: before they are there nothing can be
    said of them, and a run would be one on the CPUs of its head. They are paid for as soon as they are there, so their
    price has to be known before.

    Raises:
        CapacityError: they do not come.
        PriceError: they would have to be added, and have no price.
    """
    if not ray.is_remote():
        return identified(hardware.detect())
    config = request.config
    per_engine, num_nodes, kind = config.accelerators_per_engine, config.nodes_per_engine, config.accelerator_type
    if kind is not None:
        engine = on_accelerators(per_engine, nodes_per_engine=num_nodes, accelerator_type=kind)
        if ray.room_for(engine) < config.engine_range.smallest:
            require_price(config, engine.accelerator_type)
        ray.require_capacity(
            engine,
            config.engine_range.smallest,
            wait_s=config.cluster_wait_s,
            check=request.require_time,
            announce=announce,
        )
    return inspection.inspect(accelerators_per_engine=per_engine, nodes_per_engine=num_nodes, accelerator_type=kind)


def _num_nodes(request: RunRequest, here: Hardware) -> int:
    config = request.config
    return ray.num_nodes(
        here,
        num_engines=config.engine_range.smallest,
        accelerators_per_engine=config.accelerators_per_engine,
        nodes_per_engine=config.nodes_per_engine,
        accelerator_type=config.accelerator_type,
    )
