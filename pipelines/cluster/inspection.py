"""Inspect a node of the cluster (hardware, instance type, region) without reserving anything."""

import contextlib
import os
from dataclasses import replace

import psutil

from peagle.errors import CapacityError
from peagle.hardware import Hardware, detect_machine
from pipelines.cluster.failures import to_peagle_error
from pipelines.cluster.placement import accelerator_placement, node_to_inspect
from pipelines.cluster.ray import NO_RAY_HINT

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The last parts of labels with an instance type or a region, such as Ray's `ray.io/node-group` and Kubernetes'
# `node.kubernetes.io/instance-type`.
_NAME_LABELS = ("instance-type", "node-group", "availability-region", "region")


def inspect(
    *, accelerators_per_engine: int = 1, nodes_per_engine: int = 1, accelerator_type: str | None = None
) -> Hardware:
    """Return the hardware of a node on which engines can run: one with accelerators, if there is one.

    No accelerator is reserved, so this does not wait for busy accelerators.

    Raises:
        CapacityError: the node does not respond.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    placement = accelerator_placement(
        accelerators_per_engine, nodes_per_engine=nodes_per_engine, accelerator_type=accelerator_type
    )
    node = node_to_inspect(nodes, placement)
    where = {} if node is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    probe = ray.remote(num_cpus=0, max_retries=0, **where)(_detect)
    try:
        hardware: Hardware = ray.get(probe.remote())
    except Exception as error:  # for example, the node was removed
        raise to_peagle_error(
            error, "cannot inspect a node of the cluster", hint=NO_RAY_HINT, otherwise=CapacityError
        ) from error
    if node is None or hardware.platform != "cuda":
        return hardware
    return replace(hardware, num_accelerators=int(nodes[node]["GPU"]))  # Ray might have been started with fewer GPUs


def _detect() -> Hardware:
    """Return the hardware of this node, with its instance type and region if known.

    The result includes all accelerators that Ray has on the node. Ray empties CUDA_VISIBLE_DEVICES for a task that
    reserved none, so the value is read from the task's parent process, the raylet.
    """
    import ray

    os.environ.pop(_VISIBLE, None)
    with contextlib.suppress(psutil.Error):
        raylet_env = psutil.Process(os.getppid()).environ()
        if _VISIBLE in raylet_env:
            os.environ[_VISIBLE] = raylet_env[_VISIBLE]
    hardware = detect_machine()
    labels = ray.get_runtime_context().get_node_labels()
    names = [value for key, value in labels.items() if key.rpartition("/")[2] in _NAME_LABELS]
    return replace(hardware, machine_names=tuple(dict.fromkeys([*hardware.machine_names, *names])))
