"""The Ray cluster of a run: start or join it, see what it has, and refuse what it can never hold.

It knows Ray's public API; it does not know units or models.
"""

import atexit
import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from peagle import hardware
from peagle.economics.prices import Device
from peagle.errors import CapacityError, ConfigError, StoppedEarly
from peagle.hardware import Hardware
from pipelines.failures import explain

PREPARE_CPUS = 0.25  # logical CPUs of a task that reads and tokenises; it must fit beside engines on two cores
_POLL_S = 5.0
_NO_RAY = "make sure that the cluster is up and this machine is not overloaded; the same command tries again"
_abandoned = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one engine actor reserves of the cluster, and what of a node it really uses.

    Attributes:
        num_cpus, num_gpus: Ray's logical resources.
        num_devices: accelerators, or vCPUs, whose seconds the engine is charged for.
        device: which of the two.
        num_engines_on_node: engines that share the node's cores.
    """

    num_cpus: float
    num_gpus: int
    num_devices: int
    device: Device
    num_engines_on_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Engines of others on the same nodes, with which those of a run share the cores.

    Attributes:
        places: the name under which all of them number their places on a node (`node.claim_slot`).
        hardware: of a node, as it was when nothing ran there. Asking one with accelerators would wait for a free one.
        placement: what an engine of the run takes when all are counted.
    """

    places: str
    hardware: Hardware
    placement: Placement


def is_remote() -> bool:
    """Whether RAY_ADDRESS names a cluster to run on."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_cluster(*, metrics_port: int | None = None) -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine and stop it at the end.

    A process that has joined one already keeps it.

    Args:
        metrics_port: of Ray's Prometheus exporter, where Ray is started here; one that is free if None.

    Raises:
        CapacityError: it did not come up, or cannot be joined.
        ConfigError: a metrics port is named for a cluster that runs, or something else has it.
    """
    import ray

    if metrics_port is not None:
        _check_metrics_port(metrics_port)
    if ray.is_initialized():
        yield
        return
    remote = is_remote()
    # Ray's own default is 15: an engine would give way to everything else on its machine, Ray and this driver included.
    os.environ.setdefault("RAY_worker_niceness", str(os.nice(0)))
    try:
        ray.init(
            address=None if remote else "local",
            num_cpus=None if remote else max(2, hardware.detect().num_cpus),
            include_dashboard=False if not remote else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
            _metrics_export_port=metrics_port,
        )
    except Exception as error:  # Ray raises bare ones, for a raylet that was too slow for example
        what = f"cannot join the Ray cluster at {os.environ['RAY_ADDRESS']}" if remote else "Ray did not start here"
        raise explain(error, what, hint=_NO_RAY, otherwise=CapacityError) from error
    try:
        yield
    finally:
        if not _abandoned:
            ray.shutdown()


def _check_metrics_port(port: int) -> None:
    """On a port that is taken Ray would try to start for half a minute, and then not say why it did not."""
    if is_remote():
        raise ConfigError(
            "metrics_port: Ray's exporters are those of the cluster that RAY_ADDRESS names",
            hint="choose their port where its nodes are started: ray start --metrics-export-port",
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"metrics_port {port}: {error.strerror}", hint="leave it out for one that is free"
            ) from error


def metrics_port() -> int:
    """Where the Prometheus exporter of the node that this process is on listens."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (port,) = (node["MetricsExportPort"] for node in ray.nodes() if node["NodeID"] == here)
    return int(port)


def abandon(exit_code: int = StoppedEarly.exit_code) -> None:
    """Leave Ray as it is until this process ends, and end it hard then, with that code.

    For an execution that does not come back, such as one whose engine is still loading: `ray.shutdown` under its feet
    aborts the process. Ray's own processes on this machine go with ours.
    """
    global _abandoned
    _abandoned = True
    atexit.register(_exit_hard, exit_code)


def _exit_hard(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def inspect(*, on_accelerators: bool | None = None) -> Hardware:
    """The hardware of a node that will run engines: asked of one that has GPUs, if the cluster has any."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0) if on_accelerators is None else on_accelerators
    probe = ray.remote(num_cpus=0, num_gpus=1 if gpus else 0, max_retries=0)(hardware.detect)
    found: Hardware = ray.get(probe.remote())
    return found


def place(
    hardware: Hardware, *, num_engines: int, accelerators_per_engine: int, num_nodes: int, most_engines: int = 0
) -> Placement:
    """What each of `num_engines` engines takes of nodes like this.

    On CPU an engine computes on its share of the node's cores but reserves one logical CPU less, so that Ray can
    still place the tasks that feed it.

    Args:
        most_engines: so many there may be later; a node is shared by as many of them as it can hold.

    Example: two engines on one node of 2 CPUs reserve 0.5 logical CPUs each and are charged for 1 vCPU each.

    Raises:
        CapacityError: fewer cores than engines, or than an engine's ranks.
    """
    per_node = math.ceil(num_engines / num_nodes)
    fit = (hardware.num_accelerators or hardware.num_cpus) // accelerators_per_engine
    per_node = max(per_node, min(math.ceil(most_engines / num_nodes), fit))
    if hardware.platform == "cuda":
        return Placement(
            num_cpus=1,
            num_gpus=accelerators_per_engine,
            num_devices=accelerators_per_engine,
            device="accelerator",
            num_engines_on_node=per_node,
        )
    cpus = hardware.num_cpus // per_node
    if cpus < accelerators_per_engine:
        need = "a CPU core each" if accelerators_per_engine == 1 else f"{accelerators_per_engine} CPU cores each"
        raise CapacityError(
            f"{num_engines} engines need {need}; {num_nodes} node(s) have {hardware.num_cpus} each",
            hint=f"use at most --engines {fit * num_nodes}" if fit else "use fewer ranks an engine",
        )
    return Placement(
        num_cpus=float(cpus - 1) or 0.5,
        num_gpus=0,
        num_devices=cpus,
        device="vcpu",
        num_engines_on_node=per_node,
    )


def scale_with_the_queue() -> None:
    """Have Ray Data want another actor when each has all the calls that it can take and as many again wait for one
    more; and let one go that has none. Ray Data 2.60's default, 1.75 times its calls, is never reached where an actor
    queues only one call.
    """
    from ray.data import DataContext

    autoscaling = DataContext.get_current().autoscaling_config
    autoscaling.actor_pool_util_upscaling_threshold = 1.0
    autoscaling.actor_pool_util_downscaling_threshold = 0.5


def keep_rows_apart() -> None:
    """Have Ray Data make a block of each row, as soon as it is there, in any order, and print nothing."""
    from ray.data import DataContext

    keep_blocks()
    DataContext.get_current().target_max_block_size = 1  # byte: it ends a block, and never splits a row


def keep_blocks() -> None:
    """Have Ray Data pass blocks on as they are, in any order, however long one takes, and print nothing."""
    from ray.data import DataContext, ExecutionOptions

    context = DataContext.get_current()
    # Ray 2.60 ends a run in which nothing was finished for half an hour. A long unit, a large model that loads or a
    # cluster that waits for machines takes longer; `--engine-timeout-s` and `--deadline` are there for what hangs.
    context.execution_no_progress_timeout_s = -1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = None  # a block must stay one, however long its rows are
    context.execution_options = ExecutionOptions(preserve_order=False)


def require_workers(count: int, *, on_gpu: bool) -> None:
    """Make sure that `count` workers of a CPU each, and of a GPU each where there are any, can run at once.

    Raises:
        CapacityError: they cannot; Ray would wait for ever in silence.
    """
    import ray

    kind = "GPU" if on_gpu else "CPU"
    available = int(ray.cluster_resources().get(kind, 0))
    if available < count:
        raise CapacityError(
            f"{count} workers need a {kind} each; the cluster has {available}",
            hint=f"use at most --workers {available}",
        )


def require_capacity(placement: Placement, num_engines: int, *, wait_s: float, announce: Callable[[str], None]) -> None:
    """Make sure that the engines and one task beside them can be scheduled; else Ray would wait for ever in silence.

    Raises:
        CapacityError: they cannot, not even after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while lacking := _lacking(placement, num_engines):
        left = deadline - time.monotonic()
        if left <= 0:
            raise CapacityError(
                f"the cluster can never schedule {num_engines} engine(s): {lacking}",
                hint="use fewer --engines, or give an autoscaled cluster time to grow with --cluster-wait-s 900",
            )
        _ask_for_nodes(placement, num_engines)
        announce(f"waiting for the cluster: {lacking} ({left:.0f} s left)")
        time.sleep(min(_POLL_S, left))


def num_nodes() -> int:
    """Nodes of the cluster that are alive and have CPUs."""
    import ray

    return max(1, sum(bool(n["Alive"] and n["Resources"].get("CPU")) for n in ray.nodes()))


def room_for(placement: Placement) -> int:
    """Engines that the cluster has room for as it is, beside one task that feeds them."""
    nodes = _nodes()
    room = sum(_room_on(node, placement) for node in nodes)
    return room if _spare_cpus(nodes, placement, room) >= PREPARE_CPUS else room - 1


def _spare_cpus(nodes: Sequence[Mapping[str, float]], placement: Placement, num_engines: int) -> float:
    return sum(node.get("CPU", 0) for node in nodes) - placement.num_cpus * num_engines


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _room_on(node: Mapping[str, float], placement: Placement) -> int:
    by_cpu = math.floor(node.get("CPU", 0) / placement.num_cpus)
    return min(by_cpu, math.floor(node.get("GPU", 0) / placement.num_gpus)) if placement.num_gpus else by_cpu


def _lacking(placement: Placement, num_engines: int) -> str:
    """What is missing, in words; empty if every engine fits on some node."""
    nodes = _nodes()
    room = sum(_room_on(node, placement) for node in nodes)
    if room < num_engines:
        each = f"{placement.num_gpus} GPU(s)" if placement.num_gpus else f"{placement.num_cpus:g} CPU(s)"
        return f"each needs {each} on one node, and {len(nodes)} node(s) have room for {room}"
    spare = _spare_cpus(nodes, placement, num_engines)
    if spare < PREPARE_CPUS:
        return f"{spare:g} CPUs would be left for the tasks that feed them, which take {PREPARE_CPUS}"
    return ""


def _ask_for_nodes(placement: Placement, num_engines: int) -> None:
    from ray.autoscaler.sdk import request_resources

    bundle = {"CPU": math.ceil(placement.num_cpus)} | ({"GPU": placement.num_gpus} if placement.num_gpus else {})
    request_resources(bundles=[bundle] * num_engines)
