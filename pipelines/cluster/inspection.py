"""Inspect a node of the cluster: its hardware, instance type and region. It reserves nothing."""

import contextlib
import os
from dataclasses import replace

import psutil

from peagle import hardware
from peagle.errors import CapacityError
from peagle.hardware import Hardware
from peagle.machine import identified
from pipelines.cluster.failures import explain
from pipelines.cluster.placement import node_to_ask, on_accelerators
from pipelines.cluster.ray import NO_RAY

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The last parts of labels that may have an instance type or a region: `ray.io/node-group` is Ray's, and
# `node.kubernetes.io/instance-type` Kubernetes'.
_TELLING_LABELS = ("instance-type", "node-group", "availability-region", "region")


def inspect(
    *, accelerators_per_engine: int = 1, nodes_per_engine: int = 1, accelerator_type: str | None = None
) -> Hardware:
    """Return the hardware of a node for engines; of one with accelerators, if there is any.

    It reserves no accelerator, so it does not wait for busy ones.

    Raises:
        CapacityError: the node does not respond.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    engine = on_accelerators(
        accelerators_per_engine, nodes_per_engine=nodes_per_engine, accelerator_type=accelerator_type
    )
    node = node_to_ask(nodes, engine)
    where = {} if node is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    probe = ray.remote(num_cpus=0, max_retries=0, **where)(_look)
    try:
        found: Hardware = ray.get(probe.remote())
    except Exception as error:  # raised by Ray when the node is removed
        raise explain(error, "cannot look at a node of the cluster", hint=NO_RAY, otherwise=CapacityError) from error
    if node is None or found.platform != "cuda":
        return found
    return replace(found, num_accelerators=int(nodes[node]["GPU"]))  # fewer if Ray was started so


def _look() -> Hardware:
    """Return the hardware of this node, with its instance type and region if known."""
    import ray

    found = identified(_detect_all())
    labels = ray.get_runtime_context().get_node_labels()
    told = [value for key, value in labels.items() if key.rpartition("/")[2] in _TELLING_LABELS]
    return replace(found, machine_names=tuple(dict.fromkeys([*found.machine_names, *told])))


def _detect_all() -> Hardware:
    """Return the hardware of this node with all accelerators of its Ray, not only those of this task.

    Ray may have been started with some of the accelerators. It empties CUDA_VISIBLE_DEVICES for a task that reserved
    none; the raylet, its parent, still has the value.
    """
    os.environ.pop(_VISIBLE, None)
    with contextlib.suppress(psutil.Error):
        given = psutil.Process(os.getppid()).environ()
        os.environ |= {_VISIBLE: given[_VISIBLE]} if _VISIBLE in given else {}
    return hardware.detect()
