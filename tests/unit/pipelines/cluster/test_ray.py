import contextlib
import inspect
import os
import signal
import socket
import sys

import pytest

from peagle.errors import CapacityError, ConfigError, EngineError, StoppedEarly
from peagle.signals import signals_as_interrupts
from pipelines.cluster import ray as cluster
from pipelines.cluster.placement import accelerator_placement
from pipelines.cluster.ray import ray_cluster


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, "Ray did not start here: too slow"),
        ("10.0.0.1:6379", "cannot join the Ray cluster at 10.0.0.1:6379: too"),
    ],
)
def test_failed_ray_start_is_a_capacity_error(monkeypatch, address, message):
    import ray

    def fail(**_):
        raise Exception("too slow")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    with pytest.raises(CapacityError, match=message), ray_cluster():
        pass


def test_metrics_port_in_use_is_refused(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port {port}: "), ray_cluster(metrics_port=port):
            pass


@pytest.mark.parametrize(("configured", "expected"), [(None, str(os.nice(0))), ("7", "7")])
def test_workers_have_the_niceness_of_the_command(monkeypatch, configured, expected):
    import ray

    environment = {} if configured is None else {"RAY_worker_niceness": configured}
    variables_at_start = {}
    monkeypatch.setattr(ray, "init", lambda **_: variables_at_start.update(environment))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.os, "environ", environment)
    with ray_cluster():
        assert variables_at_start["RAY_worker_niceness"] == expected


def test_ray_variables_exist():
    import ray
    from ray._private import ray_constants

    assert ray_constants.RAY_WORKER_NICENESS == "RAY_worker_niceness"
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert '"_metrics_export_port"' in inspect.getsource(ray.init)


def test_ray_replaces_sigterm_handler():
    """If this fails, `ray_cluster` no longer needs to restore the handler."""
    import ray

    assert "set_sigterm_handler(sigterm_handler)" in inspect.getsource(ray.init)


def test_defaults_of_ray_data_are_unchanged():
    from ray.data.context import DataContext

    context = DataContext()
    assert context.execution_no_progress_timeout_s == 1800
    assert context.autoscaling_config.actor_pool_util_upscaling_threshold == 1.75


@pytest.fixture
def signals_during_ray_start(monkeypatch):
    """A list of signals that arrive while a fake of Ray starts. Like Ray 2.60, the fake installs a SIGTERM handler."""
    import ray

    signals = []

    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        for number in signals:
            signal.raise_signal(number)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    before = signal.getsignal(signal.SIGTERM)
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_sigterm_handler_is_restored(signals_during_ray_start):
    with signals_as_interrupts():
        handler = signal.getsignal(signal.SIGTERM)
        with ray_cluster(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler


def test_sigterm_during_ray_start_is_an_interrupt(signals_during_ray_start):
    signals_during_ray_start.append(signal.SIGTERM)
    with signals_as_interrupts(), pytest.raises(KeyboardInterrupt), ray_cluster():
        pytest.fail("the signal was ignored")


def test_rays_sigterm_handler_replaces_the_default_handler(signals_during_ray_start):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with ray_cluster(), pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (StoppedEarly("s"), 3), (EngineError("e"), 1), (OSError(), 1), (TypeError(), 1)]
)
def test_exit_code_after_abandoning_ray(monkeypatch, error, code):
    codes, hooks = [], []
    monkeypatch.setattr(cluster, "_abandoned", False)
    monkeypatch.setattr(cluster, "_exit_code", 3)
    monkeypatch.setattr(cluster.atexit, "register", hooks.append)
    monkeypatch.setattr(cluster.os, "_exit", codes.append)
    with contextlib.suppress(*[type(error)] if error else []), cluster.recording_exit_code():
        cluster.abandon()
        if error:
            raise error
    hooks[0]()
    assert codes == [code]


HEAD_NODE = {"CPU": 4.0}
GPU_NODE = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:RTX-PRO-6000": 1.0}


@pytest.fixture
def growing_cluster(monkeypatch):
    """A function that calls `require_capacity` with successive lists of nodes, and lists of requests and messages."""
    requests, messages, node_snapshots = [], [], []
    monkeypatch.setattr(cluster, "_has_requested_nodes", False)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        cluster, "_nodes", lambda: node_snapshots.pop(0) if len(node_snapshots) > 1 else node_snapshots[0]
    )
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda *, bundles: requests.append(bundles))

    def require(*nodes, num_engines, wait_s=900.0, check=lambda: None):
        node_snapshots[:] = nodes
        engine = accelerator_placement(1, accelerator_type="RTX-PRO-6000")
        cluster.require_capacity(engine, num_engines, wait_s=wait_s, check=check, announce=messages.append)

    return require, requests, messages


def test_require_capacity_waits_for_autoscaler(growing_cluster):
    require, requests, messages = growing_cluster
    require([HEAD_NODE], [HEAD_NODE, GPU_NODE], [HEAD_NODE, GPU_NODE, GPU_NODE], num_engines=2)
    # Two engines, requested at each poll.
    assert requests == [[{"CPU": 1.0, "GPU": 1.0, "accelerator_type:RTX-PRO-6000": 0.001}] * 2] * 2
    assert "each needs 1 RTX-PRO-6000 GPU(s) on one node, and 2 node(s) have room for 1" in messages[1]


def test_require_capacity_stops_waiting_when_check_raises(growing_cluster):
    require, requests, _ = growing_cluster
    results = iter([None, StoppedEarly("the deadline is near")])

    def check():
        if error := next(results):
            raise error

    with pytest.raises(StoppedEarly, match="the deadline is near"):
        require([HEAD_NODE], num_engines=1, check=check)
    assert len(requests) == 1
    # `check` also runs once after the nodes arrive, because the deadline might have passed by then.
    with pytest.raises(StopIteration):
        require([HEAD_NODE, GPU_NODE], num_engines=1, check=check)


def test_requested_nodes_are_released_once(growing_cluster):
    require, requests, _ = growing_cluster
    cluster.release_nodes()
    assert requests == []
    require([HEAD_NODE], [HEAD_NODE, GPU_NODE], num_engines=1)
    cluster.release_nodes()
    cluster.release_nodes()
    assert requests[1:] == [[]]


def test_require_capacity_times_out(growing_cluster):
    require, _, _ = growing_cluster
    with pytest.raises(CapacityError, match=r"cannot schedule 2 engine(.|\n)*room for 1(.|\n)*--cluster-wait-s"):
        require([HEAD_NODE, GPU_NODE], num_engines=2, wait_s=0.0)


def test_ray_calls_do_not_join_a_cluster_on_this_machine():
    """With auto-connect, Ray would join a cluster that another process started."""
    import ray
    from ray._private import auto_init_hook

    assert auto_init_hook.enable_auto_connect is False
    with pytest.raises(ray.exceptions.RaySystemError, match="not been started"):
        ray.nodes()
