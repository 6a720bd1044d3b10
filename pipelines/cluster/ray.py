"""Start or join a Ray cluster, configure Ray Data, and wait until the cluster has room for engines."""

import atexit
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from peagle import hardware
from peagle.errors import CapacityError, ConfigError, PeagleError, StoppedEarly
from peagle.hardware import Hardware
from peagle.ports import require_free
from pipelines.cluster import token
from pipelines.cluster.failures import to_peagle_error
from pipelines.cluster.placement import Placement, missing_resources, num_engine_nodes, num_engines_that_fit
from pipelines.cluster.startable import require_startable
from pipelines.cluster.terminal import new_process_groups, send_ray_messages_to_stderr
from pipelines.cluster.vitals import Vitals, joined_parts, local_parts

_POLL_S = 5.0
NO_RAY_HINT = "make sure that the cluster is up and this machine is not overloaded, then run the same command again"
_JOIN_HINT = (
    "make sure that the cluster is up, and that its token is here (~/.ray/auth_token, or RAY_AUTH_TOKEN): "
    "see docs/security.md"
)
# For nodes that a user starts (as in deploy/ray.env): engines get normal priority instead of Ray's niceness of 15.
NODE_ENVIRONMENT = {"RAY_worker_niceness": "0"}
IF_LOST = "Work in progress is lost; finished work is saved. It is safe to run the same command again"
_abandoned = False
_vitals: Vitals | None = None
_exit_code = StoppedEarly.exit_code
_has_requested_nodes = False


def is_remote() -> bool:
    """Whether RAY_ADDRESS names a cluster."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_cluster(
    *, metrics_port: int | None = None, if_lost: str = IF_LOST, preload: str | None = None
) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS, or start one here and stop it at the end.

    A process that has already joined a cluster keeps using it. An existing SIGTERM handler stays in place.

    Args:
        metrics_port: port of Ray's Prometheus exporter; None means a free port on the loopback address.
        if_lost: the hint of `RayDied`: what is lost, and how to continue.
        preload: a module to import in a thread while Ray starts.

    Raises:
        CapacityError: the cluster did not start, or cannot be joined.
        RayDied: the cluster's control service or this machine's raylet died.
        ConfigError: the metrics port is in use, or set for a remote cluster, or the cluster requires no token.
    """
    global _vitals, _exit_code
    has_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if metrics_port is not None:
        if is_remote():
            raise ConfigError(
                "metrics_port: cannot be set for the cluster of RAY_ADDRESS, which has its own exporters",
                hint="choose their port where its nodes are started: ray start --metrics-export-port",
            )
        # Ray would fail late and silently.
        require_free("metrics_port", metrics_port, hint="remove the option to use a free port")
    if has_joined:
        yield
        return
    _set_up_environment(has_metrics_port=metrics_port is not None)
    import ray

    if preload is not None:
        threading.Thread(target=importlib.import_module, args=(preload,), daemon=True).start()
    joins_remote = is_remote()
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    send_ray_messages_to_stderr()
    try:
        with new_process_groups():
            ray.init(
                address=None if joins_remote else "local",
                num_cpus=None if joins_remote else max(2, hardware.detect().num_cpus),
                include_dashboard=False if not joins_remote else None,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
                _metrics_export_port=metrics_port,
            )
    except Exception as error:  # Ray raises bare exceptions, for example for a slow raylet
        message = (
            f"cannot join the Ray cluster at {os.environ['RAY_ADDRESS']}" if joins_remote else "Ray did not start here"
        )
        raise to_peagle_error(
            error, message, hint=_JOIN_HINT if joins_remote else NO_RAY_HINT, otherwise=CapacityError
        ) from error
    except SystemExit:  # Ray received SIGTERM while it started
        raise KeyboardInterrupt from None
    try:
        if sigterm_handler != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm_handler)
        if joins_remote:
            token.require_token()
        _vitals = Vitals(joined_parts() if joins_remote else local_parts(), if_lost)
        with _vitals.watching():
            yield
    finally:
        if _vitals is not None and (ray_died := _vitals.check()):
            _exit_code = ray_died.exit_code
            abandon()  # `ray.shutdown` would wait for the dead part
            atexit.register(_vitals.kill_leftovers)
        elif not _abandoned:
            ray.shutdown()
        _vitals = None


def require_alive() -> None:
    """Raise `RayDied` if a part of Ray is dead. Ray's own error would be misleading."""
    if _vitals is not None and (ray_died := _vitals.check()):
        raise ray_died


def _set_up_environment(*, has_metrics_port: bool) -> None:
    """Set variables for Ray, some of which it reads on import."""
    # Engines inherit the niceness of this process. With Ray's default of 15, all other processes would have priority.
    os.environ.setdefault("RAY_worker_niceness", str(os.nice(0)))
    # Otherwise a thread that calls Ray after `ray.shutdown` would join any cluster on this machine, or start one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if is_remote():
        token.prepare_to_join()
        return
    require_startable()
    if not has_metrics_port:
        # Despite its name, this variable applies on all systems. With 0, Ray only listens on the loopback address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def metrics_port() -> int:
    """Return the port of the Prometheus exporter on this node."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    (port,) = (node["MetricsExportPort"] for node in ray.nodes() if node["NodeID"] == node_id)
    return int(port)


def abandon() -> None:
    """Make this process end without `ray.shutdown`, which would abort while an engine is still loading.

    Ray's processes on this machine end with this process. Its exit code is that of `recording_exit_code`, or 3.
    """
    global _abandoned
    _abandoned = True
    atexit.register(_exit_immediately)


@contextlib.contextmanager
def recording_exit_code() -> Iterator[None]:
    """Record the exit code of the `with` block. After `abandon`, the process ends with this code."""
    global _exit_code
    try:
        yield
    except Exception as error:
        _exit_code = error.exit_code if isinstance(error, PeagleError) else PeagleError.exit_code
        raise
    _exit_code = 0


def _exit_immediately() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_code)


def scale_actors_with_queue() -> None:
    """Make Ray Data add an actor when all actors are full and calls are waiting, and remove actors without calls.

    The default threshold of Ray Data 2.60 is 1.75 times the concurrent calls of the actors. That is never reached,
    since each actor queues only one call.
    """
    from ray.data import DataContext

    autoscaling = DataContext.get_current().autoscaling_config
    autoscaling.actor_pool_util_upscaling_threshold = 1.0
    autoscaling.actor_pool_util_downscaling_threshold = 0.5


def use_one_block_per_row() -> None:
    """Configure Ray Data to return each row as a block, in any order, without a progress bar."""
    from ray.data import DataContext

    keep_block_sizes()
    DataContext.get_current().target_max_block_size = 1  # byte: a block ends after every row


def keep_block_sizes() -> None:
    """Configure Ray Data not to split or merge blocks, to return them in any order, and to show no progress bar."""
    from ray.data import DataContext, ExecutionOptions

    context = DataContext.get_current()
    # Ray 2.60 ends a run if no task finishes for half an hour. A long unit, loading a large model, or waiting for
    # machines may take longer. `--engine-timeout-s` and `--deadline` end a run that hangs.
    context.execution_no_progress_timeout_s = -1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = None  # never split a block, even with long rows
    context.execution_options = ExecutionOptions(preserve_order=False)


def has_gpus() -> bool:
    """Whether a node of the cluster has a GPU, busy or free."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def require_workers(count: int, *, on_gpu: bool) -> None:
    """Check that `count` workers fit simultaneously, each with a CPU or a GPU. Otherwise Ray would wait forever.

    Raises:
        CapacityError: the workers do not fit.
    """
    import ray

    resource = "GPU" if on_gpu else "CPU"
    available = int(ray.cluster_resources().get(resource, 0))
    if available < count:
        raise CapacityError(
            f"{count} workers need a {resource} each; the cluster has {available}",
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
    """Wait until the engines and a task that feeds them fit on the cluster. Ray itself would wait forever.

    Args:
        check: called at each poll. It may raise an error to stop waiting.

    Raises:
        CapacityError: the engines do not fit after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while missing := missing_resources(_nodes(), placement, num_engines):
        check()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise CapacityError(
                f"the cluster cannot schedule {num_engines} engine(s): {missing}",
                hint="use fewer --engines, or give an autoscaled cluster time to grow with --cluster-wait-s 900",
            )
        _request_nodes(placement, num_engines)
        announce(f"waiting for the cluster: {missing} ({left_s:.0f} s left)")
        time.sleep(min(_POLL_S, left_s))
    check()


def release_nodes() -> None:
    """Withdraw this process's request to the autoscaler, which otherwise keeps the nodes forever."""
    global _has_requested_nodes
    if _has_requested_nodes:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[])
        _has_requested_nodes = False


def num_nodes(
    hardware: Hardware,
    *,
    num_engines: int = 1,
    accelerators_per_engine: int = 1,
    nodes_per_engine: int = 1,
    accelerator_type: str | None = None,
) -> int:
    """Return the number of nodes among which engines are divided (`num_engine_nodes`)."""
    return num_engine_nodes(
        _nodes(),
        hardware,
        num_engines=num_engines,
        accelerators_per_engine=accelerators_per_engine,
        nodes_per_engine=nodes_per_engine,
        accelerator_type=accelerator_type,
    )


def room_for(placement: Placement) -> int:
    """Return the number of engines that fit on the cluster now, next to one task that feeds them."""
    return num_engines_that_fit(_nodes(), placement)


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _request_nodes(placement: Placement, num_engines: int) -> None:
    from ray.autoscaler.sdk import request_resources

    global _has_requested_nodes
    _has_requested_nodes = True
    request_resources(bundles=placement.bundles * num_engines)
