"""A node of the cluster as engines will find it: its hardware and its names.

It looks where engines can go, and takes nothing of the node. It knows neither engines nor prices.
"""

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
# The last parts of labels that may name an instance type or a region: `ray.io/node-group` is Ray's own, and
# `node.kubernetes.io/instance-type` Kubernetes'.
_TELLING_LABELS = ("instance-type", "node-group", "availability-region", "region")


def inspect(
    *, accelerators_per_engine: int = 1, nodes_per_engine: int = 1, accelerator_type: str | None = None
) -> Hardware:
    """The hardware of a node for engines; one with accelerators, if there is any.

    It takes none of them, so it does not wait for those that are busy.

    Raises:
        CapacityError: the node cannot be asked.
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
    except Exception as error:  # Ray's own, when the node goes away
        raise explain(error, "cannot look at a node of the cluster", hint=NO_RAY, otherwise=CapacityError) from error
    if node is None or found.platform != "cuda":
        return found
    return replace(found, num_accelerators=int(nodes[node]["GPU"]))  # Ray may have been given fewer than there are


def _look() -> Hardware:
    """The hardware of this task's node, with what machine and labels call it."""
    import ray

    found = identified(_detect_all())
    labels = ray.get_runtime_context().get_node_labels()
    told = [value for key, value in labels.items() if key.rpartition("/")[2] in _TELLING_LABELS]
    return replace(found, machine_names=tuple(dict.fromkeys([*found.machine_names, *told])))


def _detect_all() -> Hardware:
    """This node's hardware with all accelerators that its Ray has, not only a task's.

    Whoever started Ray there may have shown it some of them alone. Ray empties the variable for a task that reserved
    none; its parent, the raylet, still has it.
    """
    os.environ.pop(_VISIBLE, None)
    with contextlib.suppress(psutil.Error):
        given = psutil.Process(os.getppid()).environ()
        os.environ |= {_VISIBLE: given[_VISIBLE]} if _VISIBLE in given else {}
    return hardware.detect()
