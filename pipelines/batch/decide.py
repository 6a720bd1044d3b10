"""Resolve a run before it is created or continued: hardware, plan, engine, placement and price.

`decide` writes nothing. On an autoscaled cluster it requests accelerators and waits for them.
"""

from collections.abc import Callable
from typing import Literal

from peagle.economics.price_options import require_price
from peagle.engine_options import DEFAULT_MAX_NUM_SEQS
from peagle.errors import ConfigError
from peagle.hardware import Hardware, detect_machine
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, make_plan
from peagle.storage import require_usable
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import ResolvedRun, resolve
from pipelines.cluster import inspection, ray
from pipelines.cluster.connection import Connection
from pipelines.cluster.placement import accelerator_placement

_NO_RUN_HINT = "remove --retry-failed to start a run"


def decide(request: RunRequest, cluster: Connection, announce: Callable[[str], None]) -> ResolvedRun:
    """Resolve a run that can be started or continued once its lease is held.

    Args:
        announce: called with progress messages and the result.

    Raises:
        PeagleError: see `resolve` and `hardware_for`.
    """
    directory = RunDirectory(request.config.output)
    _check_request(request, directory, cluster)
    cluster.prepare()
    hardware, plan = _hardware_and_plan(request, directory, announce)
    num_nodes = _num_nodes(request, hardware) if cluster.is_remote else 1
    run = resolve(request, directory, plan, hardware, num_nodes=num_nodes, announce=announce)
    announce(run.describe())
    for note in plan.notes:
        announce(f"note: {note}")
    for note in run.engine.profile_notes(hardware):
        announce(note)
    return run


def _check_request(request: RunRequest, directory: RunDirectory, cluster: Connection) -> None:
    """Check what can be checked without a cluster.

    Raises:
        ConfigError: the directory is not usable for this run, or the run requires several nodes and there is only one.
    """
    config = request.config
    require_usable(directory.root / ".lease")
    require_run_fits(request, directory)
    if config.nodes_per_engine > 1 and not cluster.is_remote:
        raise ConfigError(
            f"nodes_per_engine {config.nodes_per_engine}: RAY_ADDRESS is not set, so there is only one node",
            hint="set RAY_ADDRESS to a cluster's address, or remove --nodes-per-engine",
        )


def require_run_fits(request: RunRequest, directory: RunDirectory) -> None:
    """Check that the directory can be used for this run. With `retry_failed`, the directory must contain a run.

    Raises:
        ConfigError: the directory cannot be used.
    """
    directory.require_own()
    if request.config.retry_failed and not directory.exists:
        raise ConfigError(f"{directory} has no run, so there are no failed rows to retry", hint=_NO_RUN_HINT)


# --- the plan


def _hardware_and_plan(
    request: RunRequest, directory: RunDirectory, announce: Callable[[str], None]
) -> tuple[Hardware, Plan]:
    """Return a node's hardware and the plan.

    If the run exists or an accelerator type is configured, the plan comes first, so that invalid input is found before
    accelerators are requested. Otherwise the plan depends on the nodes.
    """
    if directory.exists or request.config.accelerator_type:
        plan = stored_or_new_plan(request, directory, "cuda")
        return hardware_for(request, directory, announce), plan
    hardware = hardware_for(request, directory, announce)
    return hardware, stored_or_new_plan(request, directory, hardware.platform)


def stored_or_new_plan(request: RunRequest, directory: RunDirectory, platform: Literal["cpu", "cuda"]) -> Plan:
    """Return the plan of an existing run, or a new plan.

    Raises:
        InputError: the corpus cannot be read, or has no rows.
    """
    if directory.exists:
        return directory.plan()
    return make_plan(request.config, max_num_seqs=DEFAULT_MAX_NUM_SEQS[platform])


def replan(request: RunRequest, directory: RunDirectory) -> Plan:
    """Return a plan of the corpus in its current state, split like the stored plan and without retries.

    Raises:
        InputError: the corpus cannot be read, or has no rows.
    """
    stored_plan = directory.plan()
    return make_plan(request.config, stored_plan.cut, earlier_fingerprint=stored_plan.corpus_fingerprint)


# --- the hardware


def hardware_for(request: RunRequest, directory: RunDirectory, announce: Callable[[str], None]) -> Hardware:
    """Return the hardware of a node on which engines can run; for a finished run, its recorded hardware.

    Raises:
        ConfigError: the run was started on different hardware than is requested now.
        CapacityError: no such node becomes available.
        StoppedEarly: a signal or the deadline ended the wait.
    """
    if request.neighbours is not None:
        return request.neighbours.hardware
    return _hardware_of_finished_run(request, directory) or _available_hardware(request, announce)


def _hardware_of_finished_run(request: RunRequest, directory: RunDirectory) -> Hardware | None:
    """Return the hardware of a finished run, whose accelerators need not be requested again.

    Returns:
        None if rows might be left, or if no accelerator type is requested.

    Raises:
        ConfigError: the run was started on CPUs.
    """
    config = request.config
    if config.accelerator_type is None or not directory.exists:
        return None
    stored = Hardware.from_dict(directory.manifest()["run"]["hardware"])
    if stored.platform != "cuda":
        raise ConfigError(
            f"{directory} was started on {stored.describe()}: accelerator_type {config.accelerator_type} cannot "
            "continue it",
            hint="remove --accelerator-type, or start a new run with another --output",
        )
    if directory.plan().remaining_units(directory.committed()):
        return None
    may_retry = config.retry_failed and any(usage.num_failed_rows for usage in directory.usages())
    return None if may_retry else stored


def _available_hardware(request: RunRequest, announce: Callable[[str], None]) -> Hardware:
    """Return the hardware of this node or of a cluster node.

    Needed accelerators are first requested from an autoscaling cluster, since the run would otherwise use the CPUs of
    its head node. New machines cost money immediately, so their price must be known.

    Raises:
        CapacityError: the accelerators do not become available.
        PriceError: machines would have to be added, but their price is unknown.
    """
    if not ray.is_remote():
        return detect_machine()
    config = request.config
    per_engine, num_nodes = config.accelerators_per_engine, config.nodes_per_engine
    accelerator_type = config.accelerator_type
    if accelerator_type is not None:
        placement = accelerator_placement(per_engine, nodes_per_engine=num_nodes, accelerator_type=accelerator_type)
        if ray.room_for(placement) < config.engine_range.smallest:
            require_price(config, placement.accelerator_type)
        ray.require_capacity(
            placement,
            config.engine_range.smallest,
            wait_s=config.cluster_wait_s,
            check=request.require_time,
            announce=announce,
        )
    return inspection.inspect(
        accelerators_per_engine=per_engine, nodes_per_engine=num_nodes, accelerator_type=accelerator_type
    )


def _num_nodes(request: RunRequest, hardware: Hardware) -> int:
    config = request.config
    return ray.num_nodes(
        hardware,
        num_engines=config.engine_range.smallest,
        accelerators_per_engine=config.accelerators_per_engine,
        nodes_per_engine=config.nodes_per_engine,
        accelerator_type=config.accelerator_type,
    )
