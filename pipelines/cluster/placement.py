"""Compute how many engines fit on the cluster, and which resources each reserves. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.economics.prices import Device
from peagle.errors import CapacityError
from peagle.hardware import Hardware

PREPARE_CPUS = 0.25  # logical CPUs of the task that tokenises, small enough to fit next to engines on two cores
ANY_ACCELERATOR = "any"
_TYPE_PREFIX = "accelerator_type:"
_TYPE_AMOUNT = 0.001  # a node has 1 of this resource for any number of accelerators

Resources = Mapping[str, float]
"""Logical resources by Ray's names: "CPU", "GPU", "accelerator_type:H100"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The resources that an engine reserves on each of its nodes, and the devices that it uses.

    Attributes:
        num_cpus, num_gpus: Ray's logical resources.
        num_devices: number of accelerators or vCPUs, on all nodes together, for which the engine is charged.
        num_engines_on_node: number of engines that share a node's cores.
        accelerator_type: Ray's name of the accelerator type; None means any type.
        nodes_per_engine: number of nodes, each with an equal part of the engine's ranks.
    """

    num_cpus: float
    num_gpus: int
    num_devices: int
    device: Device
    num_engines_on_node: int
    accelerator_type: str | None = None
    nodes_per_engine: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Ray's options for the engine's actor."""
        type_option = {"accelerator_type": self.accelerator_type} if self.accelerator_type else {}
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus or None, **type_option}

    @property
    def resources_per_node(self) -> dict[str, float]:
        """The bundle that an engine reserves on one of its nodes, for a placement group."""
        gpus = {"GPU": float(self.num_gpus)} if self.num_gpus else {}
        type_resource = {f"{_TYPE_PREFIX}{self.accelerator_type}": _TYPE_AMOUNT} if self.accelerator_type else {}
        return {"CPU": self.num_cpus, **gpus, **type_resource}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of an engine, for the autoscaler, which only accepts whole CPUs."""
        return [{**self.resources_per_node, "CPU": float(math.ceil(self.num_cpus))}] * self.nodes_per_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Other engines on the same nodes, which share the cores with the engines of a run.

    Attributes:
        slot_group: the group in which all these engines claim slots (`node.claim_slot`).
        hardware: hardware of a node, detected while no engine was running.
        placement: placement of each engine of the run, which also counts the other engines.
    """

    slot_group: str
    hardware: Hardware
    placement: Placement


def accelerator_placement(
    accelerators_per_engine: int,
    *,
    nodes_per_engine: int = 1,
    accelerator_type: str | None = None,
    num_engines_on_node: int = 1,
) -> Placement:
    """Return the placement of an engine on accelerators; `accelerator_type` is Ray's name, `any` or None."""
    return Placement(
        num_cpus=1,
        num_gpus=accelerators_per_engine // nodes_per_engine,
        num_devices=accelerators_per_engine,
        device="accelerator",
        num_engines_on_node=num_engines_on_node,
        accelerator_type=None if accelerator_type == ANY_ACCELERATOR else accelerator_type,
        nodes_per_engine=nodes_per_engine,
    )


def place(
    hardware: Hardware,
    *,
    num_engines: int,
    accelerators_per_engine: int,
    num_nodes: int,
    nodes_per_engine: int = 1,
    max_engines: int = 0,
    accelerator_type: str | None = None,
    fewer_engines_hint: str = "use at most --engines {}",
) -> Placement:
    """Return the placement of `num_engines` engines on nodes with this hardware.

    A CPU engine uses its share of the node's cores, but leaves one of its logical CPUs to the tasks that feed it.

    Args:
        num_nodes: number of nodes with engines (`num_engine_nodes`).
        max_engines: how many engines may run later; a node's cores are divided among as many of them as fit.
        accelerator_type: the type that engines need; None means any type.
        fewer_engines_hint: the hint if there are too many engines; {} is replaced by the number that fits.

    Example: two engines on one node of 2 CPUs reserve 0.5 logical CPUs each and are charged for 1 vCPU each.

    Raises:
        CapacityError: there are fewer cores than ranks, or no accelerators although a type is given.
    """
    if accelerator_type is not None and hardware.platform != "cuda":
        raise CapacityError(
            f"accelerator_type {accelerator_type}: engines need accelerators, but this machine has none"
            f" ({hardware.describe()})",
            hint="remove the option to run on CPUs; if the node has accelerators, check that nvidia-smi shows them",
        )
    engines_per_node = math.ceil(num_engines * nodes_per_engine / num_nodes)
    ranks_on_node = accelerators_per_engine // nodes_per_engine
    num_fitting = (hardware.num_accelerators or _num_cores(hardware)) // ranks_on_node
    engines_per_node = max(engines_per_node, min(math.ceil(max_engines * nodes_per_engine / num_nodes), num_fitting))
    if hardware.platform == "cuda":
        return accelerator_placement(
            accelerators_per_engine,
            nodes_per_engine=nodes_per_engine,
            accelerator_type=accelerator_type,
            num_engines_on_node=engines_per_node,
        )
    if engines_per_node > num_fitting:
        need = "a CPU core each" if ranks_on_node == 1 else f"{ranks_on_node} CPU cores each"
        where = f" on each of {nodes_per_engine} nodes" if nodes_per_engine > 1 else ""
        max_engines_that_fit = num_fitting * num_nodes // nodes_per_engine
        raise CapacityError(
            f"{num_engines} engines need {need}{where}; {num_nodes} node(s) have {_num_cores(hardware)} each",
            hint=fewer_engines_hint.format(max_engines_that_fit)
            if max_engines_that_fit
            else "use fewer ranks per engine",
        )
    cpus = hardware.num_cpus // engines_per_node
    return Placement(
        num_cpus=float(cpus - 1) or 0.5,  # a single CPU is shared with the tasks
        num_gpus=0,
        num_devices=cpus * nodes_per_engine,
        device="vcpu",
        num_engines_on_node=engines_per_node,
        nodes_per_engine=nodes_per_engine,
    )


def _num_cores(hardware: Hardware) -> int:
    """Return the number of cores for CPU ranks: the CPU quota, or else the physical cores."""
    return hardware.num_cpus if hardware.is_cpu_quota else len(hardware.core_ids) or hardware.num_cpus


def num_engine_nodes(
    nodes: Sequence[Resources],
    hardware: Hardware,
    *,
    num_engines: int = 1,
    accelerators_per_engine: int = 1,
    nodes_per_engine: int = 1,
    accelerator_type: str | None = None,
) -> int:
    """Return the number of nodes among which engines are divided; at least the nodes of one engine.

    On CPUs, these are all nodes. On accelerators, they are the nodes that can hold an engine. If these are too few,
    nodes that must still be added count, too (`missing_resources`).

    Example: 8 engines of 1 accelerator need 8 nodes with 1 accelerator, even if the cluster has only one of them now.
    """
    if hardware.platform != "cuda":
        return max(nodes_per_engine, sum(bool(node.get("CPU")) for node in nodes))
    placement = accelerator_placement(
        accelerators_per_engine, nodes_per_engine=nodes_per_engine, accelerator_type=accelerator_type
    )
    parts_per_node = hardware.num_accelerators // placement.num_gpus
    num_needed = math.ceil(num_engines * nodes_per_engine / parts_per_node) if parts_per_node else 0
    return max(nodes_per_engine, sum(num_parts_on(node, placement) > 0 for node in nodes), num_needed)


def node_to_inspect(nodes: Mapping[str, Resources], placement: Placement) -> str | None:
    """Return the id of the node whose hardware represents all nodes with accelerators; None without accelerators.

    This is the smallest node that can hold an engine, so that its engines fit on the other nodes, too. If no node can
    hold an engine, it is the largest node.
    """
    with_room = {name: node["GPU"] for name, node in nodes.items() if num_parts_on(node, placement)}
    too_small = {name: -node["GPU"] for name, node in nodes.items() if node.get("GPU")}  # the largest first
    candidates = with_room or too_small
    return min(candidates, key=lambda name: (candidates[name], name)) if candidates else None


def num_engines_that_fit(nodes: Sequence[Resources], placement: Placement) -> int:
    """Return the number of engines that fit on the nodes next to one task that feeds the engines."""
    num_engines = _num_fitting(nodes, placement)
    return num_engines if _spare_cpus(nodes, placement, num_engines) >= PREPARE_CPUS else num_engines - 1


def _num_fitting(nodes: Sequence[Resources], placement: Placement) -> int:
    """Return the number of engines that fit however Ray places them. An engine has one part on each of its N nodes.

    An engine does not fit if only N - 1 nodes have room for another part. So k engines always fit if the first k - 1
    cannot fill the other nodes. The worst case leaves out the N - 1 nodes with the most room. The remaining nodes
    cannot be filled if one of them has room for k parts, or if together they have room for more than (k - 1) * N parts.

    Example: 3 nodes with room for 2 parts each always hold 2 engines of two nodes. A third engine might not fit: both
    remaining parts might be on the same node.
    """
    per_engine = placement.nodes_per_engine
    worst_case = sorted(num_parts_on(node, placement) for node in nodes)[: len(nodes) - per_engine + 1]
    return max(worst_case[-1], math.ceil(sum(worst_case) / per_engine)) if len(nodes) >= per_engine else 0


def num_parts_on(node: Resources, placement: Placement) -> int:
    """Return the number of parts of engines that fit on one node."""
    if placement.accelerator_type and not node.get(f"{_TYPE_PREFIX}{placement.accelerator_type}"):
        return 0
    by_cpu = math.floor(node.get("CPU", 0) / placement.num_cpus)
    return min(by_cpu, math.floor(node.get("GPU", 0) / placement.num_gpus)) if placement.num_gpus else by_cpu


def missing_resources(nodes: Sequence[Resources], placement: Placement, num_engines: int) -> str:
    """Return a description of the missing resources, empty if all engines fit."""
    num_fitting = _num_fitting(nodes, placement)
    if num_fitting < num_engines:
        kind = f" {placement.accelerator_type}" if placement.accelerator_type else ""
        needed = f"{placement.num_gpus}{kind} GPU(s)" if placement.num_gpus else f"{placement.num_cpus:g} CPU(s)"
        where = "one node" if placement.nodes_per_engine == 1 else f"each of {placement.nodes_per_engine} nodes"
        return f"each needs {needed} on {where}, and {len(nodes)} node(s) have room for {num_fitting}"
    spare = _spare_cpus(nodes, placement, num_engines)
    if spare < PREPARE_CPUS:
        return f"{spare:g} CPUs would be left for the tasks that feed the engines, which take {PREPARE_CPUS}"
    return ""


def _spare_cpus(nodes: Sequence[Resources], placement: Placement, num_engines: int) -> float:
    return sum(node.get("CPU", 0) for node in nodes) - placement.num_cpus * placement.nodes_per_engine * num_engines
