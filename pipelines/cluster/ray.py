"""Start or join a run's Ray cluster, wait for its nodes, refuse the impossible.

It knows Ray's public API; what is decided from its answers is in `placement.py`, and what a node is in `inspection.py`.
It does not know units or models.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from peagle import hardware
from peagle.errors import CapacityError, ConfigError, PeagleError, StoppedEarly
from peagle.hardware import Hardware
from peagle.ports import require_free
from pipelines.cluster import token
from pipelines.cluster.failures import explain
from pipelines.cluster.placement import Placement, lacking, num_engine_nodes, room
from pipelines.cluster.startable import require_startable
from pipelines.cluster.terminal import keep_off_standard_output, own_groups
from pipelines.cluster.vitals import Vitals, joined_parts, local_parts

_POLL_S = 5.0
NO_RAY = "make sure that the cluster is up and this machine is not overloaded; the same command tries again"
_NO_JOIN = (
    "make sure that the cluster is up, and that its token is here (~/.ray/auth_token, or RAY_AUTH_TOKEN): "
    "docs/security.md says how it gets there"
)
# For nodes that others start, as in deploy/ray.env: engines do not give way to all else (Ray's own default is 15).
NODE_ENVIRONMENT = {"RAY_worker_niceness": "0"}
IF_LOST = "What was in progress is lost, what is finished is saved. It is safe to run the same command again"
_abandoned = False
_vitals: Vitals | None = None
_exit_code = StoppedEarly.exit_code
_asked = False


def is_remote() -> bool:
    """Whether RAY_ADDRESS names a cluster to run on."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_cluster(*, metrics_port: int | None = None, if_lost: str = IF_LOST) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS, or start one here and stop it at the end.

    A process that has joined one already keeps it. What SIGTERM does stays as it was; only where that is the system's
    own end of a process, Ray's takes its place, so that Ray is stopped.

    Args:
        metrics_port: of Ray's Prometheus exporter, where Ray is started here. Where it is None a free one is taken,
            and nothing of Ray can be reached from another machine.
        if_lost: says what is lost if a part of Ray dies, and how to go on.

    Raises:
        CapacityError: it did not come up, or cannot be joined.
        RayDied: its control service or this machine's raylet died.
        ConfigError: a metrics port is named for a cluster that runs, or something else has it; or the cluster that
            runs asks for no token.
    """
    global _vitals, _exit_code
    if metrics_port is not None:
        _check_metrics_port(metrics_port)
    has_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if not has_joined:
        _set_up_environment(has_metrics_port=metrics_port is not None)
    import ray

    if has_joined:
        yield
        return
    remote = is_remote()
    handler = signal.getsignal(signal.SIGTERM)
    keep_off_standard_output()
    try:
        with own_groups():
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
        raise explain(error, what, hint=_NO_JOIN if remote else NO_RAY, otherwise=CapacityError) from error
    except SystemExit:  # Ray's answer to a SIGTERM while it starts
        raise KeyboardInterrupt from None
    try:
        _give_back(handler)
        if remote:
            token.require_token()
        _vitals = Vitals(joined_parts() if remote else local_parts(), if_lost)
        with _vitals.watching():
            yield
    finally:
        if _vitals is not None and (lost := _vitals.look()):
            _exit_code = lost.exit_code
            abandon()  # `ray.shutdown` would wait for the part that is dead
            atexit.register(_vitals.end_leftovers)
        elif not _abandoned:
            ray.shutdown()
        _vitals = None


def require_alive() -> None:
    """Raise `RayDied` if a part of Ray is dead: Ray's own error blames something else."""
    if _vitals is not None and (lost := _vitals.look()):
        raise lost


def _set_up_environment(*, has_metrics_port: bool) -> None:
    """Set the variables that Ray reads, some of them when it is imported."""
    # Ray's own default is 15: an engine would give way to everything else on its machine, Ray and this driver included.
    os.environ.setdefault("RAY_worker_niceness", str(os.nice(0)))
    if is_remote():
        token.prepare_to_join()
        return
    require_startable()
    if not has_metrics_port:
        # Ray's word for "no other nodes", whatever the system: all of its ports are on the loopback address then.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def _give_back(handler: Any) -> None:
    """Give SIGTERM back, which Ray takes when it starts in the main thread."""
    if handler != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _check_metrics_port(port: int) -> None:
    """Refuse a taken metrics port, on which Ray would fail late and in silence."""
    if is_remote():
        raise ConfigError(
            "metrics_port: cannot be set for the cluster of RAY_ADDRESS, which has its own exporters",
            hint="choose their port where its nodes are started: ray start --metrics-export-port",
        )
    require_free("metrics_port", port, hint="leave it out for one that is free")


def metrics_port() -> int:
    """Where the Prometheus exporter of the node that this process is on listens."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (port,) = (node["MetricsExportPort"] for node in ray.nodes() if node["NodeID"] == here)
    return int(port)


def abandon() -> None:
    """Leave Ray alone and end hard with this process, with the kept code or 3.

    For an execution that does not come back, such as one whose engine is still loading: `ray.shutdown` under its feet
    aborts the process. Ray's own processes on this machine go with ours.
    """
    global _abandoned
    _abandoned = True
    atexit.register(_exit_hard)


@contextlib.contextmanager
def exit_code_kept() -> Iterator[None]:
    """Whatever this ends with is what a process ends with that has abandoned Ray."""
    global _exit_code
    try:
        yield
    except Exception as error:
        _exit_code = error.exit_code if isinstance(error, PeagleError) else PeagleError.exit_code
        raise
    _exit_code = 0


def _exit_hard() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_code)


def scale_with_the_queue() -> None:
    """Set when Ray Data adds and removes actors.

    It wants another when each has all the calls that it can take and as many again wait; it lets one go that has none.
    Ray Data 2.60's default, 1.75 times its calls, is never reached where an actor queues only one call.
    """
    from ray.data import DataContext

    autoscaling = DataContext.get_current().autoscaling_config
    autoscaling.actor_pool_util_upscaling_threshold = 1.0
    autoscaling.actor_pool_util_downscaling_threshold = 0.5


def keep_rows_apart() -> None:
    """Have Ray Data make a block of each row at once, in any order, silently."""
    from ray.data import DataContext

    keep_blocks()
    DataContext.get_current().target_max_block_size = 1  # byte: it ends a block, and never splits a row


def keep_blocks() -> None:
    """Have Ray Data pass blocks on as they come, in any order, silently."""
    from ray.data import DataContext, ExecutionOptions

    context = DataContext.get_current()
    # Ray 2.60 ends a run in which nothing was finished for half an hour. A long unit, a large model that loads or a
    # cluster that waits for machines takes longer; `--engine-timeout-s` and `--deadline` are there for what hangs.
    context.execution_no_progress_timeout_s = -1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = None  # a block must stay one, however long its rows are
    context.execution_options = ExecutionOptions(preserve_order=False)


def has_gpus() -> bool:
    """Whether a node of the cluster has a GPU, busy or not."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def require_workers(count: int, *, on_gpu: bool) -> None:
    """Require room for `count` workers at once, each with a CPU and, if any, a GPU.

    Raises:
        CapacityError: they cannot; Ray would wait for ever in silence.
    """
    import ray

    kind = "GPU" if on_gpu else "CPU"
    available = int(ray.cluster_resources().get(kind, 0))
    if available < count:
        raise CapacityError(
            f"{count} workers need a {kind} each; the cluster has {available}",
            hint=f"use at most --workers {available}" if available else "use --device cpu",
        )


def require_capacity(
    placement: Placement,
    num_engines: int,
    *,
    wait_s: float,
    check: Callable[[], None],
    announce: Callable[[str], None],
) -> None:
    """Require room for the engines and a task; Ray would wait for ever in silence.

    Args:
        check: raises when there is no sense in waiting any longer; it is asked at each look, also at the last one.

    Raises:
        CapacityError: they cannot, not even after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while missing := lacking(_nodes(), placement, num_engines):
        check()
        left = deadline - time.monotonic()
        if left <= 0:
            raise CapacityError(
                f"the cluster can never schedule {num_engines} engine(s): {missing}",
                hint="use fewer --engines, or give an autoscaled cluster time to grow with --cluster-wait-s 900",
            )
        _ask_for_nodes(placement, num_engines)
        announce(f"waiting for the cluster: {missing} ({left:.0f} s left)")
        time.sleep(min(_POLL_S, left))
    check()


def release_nodes() -> None:
    """Take back an autoscaler's request, which would keep those nodes for ever."""
    global _asked
    if _asked:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[])
        _asked = False


def num_nodes(
    hardware: Hardware,
    *,
    num_engines: int = 1,
    accelerators_per_engine: int = 1,
    nodes_per_engine: int = 1,
    accelerator_type: str | None = None,
) -> int:
    """The number of nodes that engines are divided among (`num_engine_nodes`)."""
    return num_engine_nodes(
        _nodes(),
        hardware,
        num_engines=num_engines,
        accelerators_per_engine=accelerators_per_engine,
        nodes_per_engine=nodes_per_engine,
        accelerator_type=accelerator_type,
    )


def room_for(placement: Placement) -> int:
    """Engines that the cluster has room for as it is, beside one task that feeds them."""
    return room(_nodes(), placement)


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _ask_for_nodes(placement: Placement, num_engines: int) -> None:
    from ray.autoscaler.sdk import request_resources

    global _asked
    _asked = True
    request_resources(bundles=placement.bundles * num_engines)
