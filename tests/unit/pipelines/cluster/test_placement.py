from dataclasses import replace

import pytest
from devices import cpu, gpu

from peagle.engine.memory import check_capacity
from peagle.engine.spec import EngineSpec
from peagle.errors import CapacityError
from pipelines.cluster import placement
from pipelines.cluster.placement import (
    PREPARE_CPUS,
    accelerator_placement,
    missing_resources,
    node_to_inspect,
    num_engine_nodes,
    place,
)

HEAD = {"CPU": 4.0}
G7E = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:RTX-PRO-6000": 1.0}
P5 = {"CPU": 192.0, "GPU": 8.0, "accelerator_type:H100": 1.0}


def gpu_node(num_accelerators):
    return gpu(num_accelerators=num_accelerators)


def cpu_node(num_cpus):
    return cpu(num_cpus=num_cpus, core_ids=())


@pytest.mark.parametrize(
    ("num_cpus", "num_engines", "num_nodes", "cpus_per_engine", "num_devices"),
    [(2, 1, 1, 1.0, 2), (2, 2, 1, 0.5, 1), (8, 2, 1, 3.0, 4), (8, 4, 2, 3.0, 4), (1, 1, 1, 0.5, 1)],
)
def test_cpu_engines_leave_room_for_preparation(num_cpus, num_engines, num_nodes, cpus_per_engine, num_devices):
    placement = place(cpu_node(num_cpus), num_engines=num_engines, accelerators_per_engine=1, num_nodes=num_nodes)
    assert (placement.num_cpus, placement.num_devices, placement.device) == (cpus_per_engine, num_devices, "vcpu")
    assert placement.num_engines_on_node * placement.num_cpus + PREPARE_CPUS <= num_cpus


def test_more_engines_than_cores_are_refused():
    with pytest.raises(CapacityError, match=r"3 engines need a CPU core each(.|\n)*--engines 2"):
        place(cpu_node(2), num_engines=3, accelerators_per_engine=1, num_nodes=1)


def test_hyper_threads_do_not_count_as_cores():
    threads = replace(cpu_node(8), core_ids=(0, 2, 4, 6))
    with pytest.raises(CapacityError, match=r"5 engines need a CPU core each; 1 node\(s\) have 4(.|\n)*--engines 4"):
        place(threads, num_engines=5, accelerators_per_engine=1, num_nodes=1)
    shared = place(threads, num_engines=1, accelerators_per_engine=1, num_nodes=1, max_engines=8)
    assert (shared.num_engines_on_node, shared.num_devices) == (4, 2)
    quota = replace(threads, is_cpu_quota=True)
    assert place(quota, num_engines=5, accelerators_per_engine=1, num_nodes=1).num_engines_on_node == 5


def test_gpu_engine_reserves_its_accelerators():
    placement = place(gpu_node(8), num_engines=2, accelerators_per_engine=4, num_nodes=1)
    assert (placement.num_gpus, placement.num_devices, placement.device) == (4, 4, "accelerator")


def test_node_is_shared_by_later_engines():
    one_engine = place(cpu_node(4), num_engines=1, accelerators_per_engine=1, num_nodes=1, max_engines=8)
    assert (one_engine.num_engines_on_node, one_engine.num_devices) == (4, 1)
    two_ranks = place(cpu_node(4), num_engines=1, accelerators_per_engine=2, num_nodes=1, max_engines=8)
    assert (two_ranks.num_engines_on_node, two_ranks.num_devices) == (2, 2)


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(CapacityError, match=r"1 engines need 4 CPU cores each(.|\n)*fewer ranks"):
        place(cpu_node(2), num_engines=1, accelerators_per_engine=4, num_nodes=1)


@pytest.mark.parametrize(("cpus_by_node", "num_engines"), [([8.0], 7), ([9.0], 8), ([8.0, 2.0], 9), ([1.0, 0.25], 1)])
def test_number_of_engines_that_fit_leaves_cpus_for_preparation(cpus_by_node, num_engines):
    nodes = [{"CPU": number, "GPU": 8.0} for number in cpus_by_node]
    assert placement.num_engines_that_fit(nodes, accelerator_placement(1)) == num_engines


@pytest.mark.parametrize(
    ("nodes", "num_accelerators", "num_engines", "expected"),
    [
        ([HEAD, G7E], 1, 8, 8),  # the others have not arrived yet
        ([HEAD, G7E, G7E], 1, 8, 8),
        ([HEAD] + [G7E] * 8, 1, 8, 8),
        ([HEAD, P5], 8, 16, 2),
        ([HEAD, P5, P5, P5], 8, 4, 3),
    ],
)
def test_engines_are_divided_among_present_and_future_nodes(nodes, num_accelerators, num_engines, expected):
    node = gpu_node(num_accelerators)
    num_nodes = num_engine_nodes(nodes, node, num_engines=num_engines)
    assert num_nodes == expected
    placement = place(node, num_engines=num_engines, accelerators_per_engine=1, num_nodes=num_nodes, max_engines=64)
    check_capacity(EngineSpec(model="org/model"), node, num_engines_on_node=placement.num_engines_on_node)


def test_engine_too_large_for_any_node_is_refused():
    node = gpu_node(1)
    num_nodes = num_engine_nodes([HEAD, G7E], node, num_engines=1, accelerators_per_engine=8)
    placement = place(node, num_engines=1, accelerators_per_engine=8, num_nodes=num_nodes)
    spec = EngineSpec(model="org/model", tensor_parallel_size=8)
    with pytest.raises(CapacityError, match="need 8; this node has 1"):
        check_capacity(spec, node, num_engines_on_node=placement.num_engines_on_node)


def test_cpu_engines_are_divided_among_all_nodes():
    assert num_engine_nodes([HEAD, HEAD, {"memory": 1.0}], cpu_node(4), num_engines=20) == 2
    assert num_engine_nodes([], cpu_node(4)) == 1


@pytest.mark.parametrize(
    ("per_engine", "kind", "expected"),
    [(1, None, "g7e"), (1, "any", "g7e"), (1, "H100", "p5"), (8, None, "p5"), (16, None, "p5"), (1, "L4", "p5")],
)
def test_node_to_inspect_has_the_accelerators_of_an_engine(per_engine, kind, expected):
    nodes = {"head": HEAD, "p5": P5, "g7e": G7E}
    assert node_to_inspect(nodes, accelerator_placement(per_engine, accelerator_type=kind)) == expected
    assert node_to_inspect({"head": HEAD}, accelerator_placement(per_engine, accelerator_type=kind)) is None


def test_accelerator_type_is_respected():
    engine = accelerator_placement(1, accelerator_type="H100")
    assert placement.num_engines_that_fit([HEAD, G7E, G7E], engine) == 0
    assert placement.num_engines_that_fit([HEAD, G7E, P5], engine) == 8
    assert (
        missing_resources([HEAD, G7E], engine, 1)
        == "each needs 1 H100 GPU(s) on one node, and 2 node(s) have room for 0"
    )
    assert missing_resources([HEAD, G7E], accelerator_placement(1, accelerator_type="any"), 1) == ""
    assert engine.bundles == [{"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}]
    assert engine.options == {"num_cpus": 1, "num_gpus": 1, "accelerator_type": "H100"}
    assert accelerator_placement(2).options == {"num_cpus": 1, "num_gpus": 2}


@pytest.mark.parametrize(
    ("parts_by_node", "nodes_per_engine", "num_engines"),  # a part is 4 GPUs: one node's share of an engine
    [
        ([1, 1], 2, 1),
        ([2, 2], 2, 2),
        ([5, 1], 2, 1),
        ([4], 2, 0),
        ([1, 1, 1, 1], 2, 2),
        ([2, 2, 2], 2, 2),  # a third engine fits only if Ray happens to place the first two well
        ([0, 1, 1], 2, 1),
        ([1] * 7, 3, 2),
        ([3, 1], 1, 4),
    ],
)
def test_number_of_engines_that_fit_on_several_nodes(parts_by_node, nodes_per_engine, num_engines):
    nodes = [{"CPU": 100.0, "GPU": 4.0 * number} for number in parts_by_node]
    engine = accelerator_placement(4 * nodes_per_engine, nodes_per_engine=nodes_per_engine)
    assert placement.num_engines_that_fit(nodes, engine) == num_engines
    assert missing_resources(nodes, engine, num_engines) == ""
    where = f"each of {nodes_per_engine} nodes" if nodes_per_engine > 1 else "one node"
    assert missing_resources(nodes, engine, num_engines + 1) == (
        f"each needs 4 GPU(s) on {where}, and {len(nodes)} node(s) have room for {num_engines}"
    )


def test_placement_of_engine_on_several_nodes():
    engine = accelerator_placement(16, nodes_per_engine=2, accelerator_type="H100")
    assert (engine.num_gpus, engine.num_devices) == (8, 16)
    assert engine.resources_per_node == {"CPU": 1, "GPU": 8.0, "accelerator_type:H100": 0.001}
    assert engine.bundles == [engine.resources_per_node] * 2
    options = {"num_engines": 2, "accelerators_per_engine": 16, "nodes_per_engine": 2}
    assert num_engine_nodes([HEAD, P5, P5], gpu_node(8), **options, accelerator_type="H100") == 4
    assert place(gpu_node(8), **options, num_nodes=4, accelerator_type="H100") == engine
    assert node_to_inspect({"g7e": G7E, "p5": P5}, engine) == "p5"


def test_placement_of_engine_on_several_cpu_nodes():
    options = {"accelerators_per_engine": 2, "nodes_per_engine": 2}
    single = place(cpu_node(4), num_engines=1, num_nodes=2, **options)
    assert (single.num_cpus, single.num_devices, single.num_engines_on_node) == (3.0, 8, 1)
    shared = place(cpu_node(2), num_engines=2, num_nodes=2, **options)
    assert (shared.resources_per_node, shared.num_devices, shared.num_engines_on_node) == ({"CPU": 0.5}, 2, 2)
    assert shared.bundles == [{"CPU": 1.0}] * 2
    assert missing_resources([{"CPU": 2.0}] * 2, shared, 2) == ""
    assert (
        missing_resources([{"CPU": 1.0}] * 2, shared, 2)
        == "0 CPUs would be left for the tasks that feed the engines, which take 0.25"
    )
    with pytest.raises(CapacityError, match=r"5 engines need a CPU core each on each of 2 nodes(.|\n)*--engines 4"):
        place(cpu_node(4), num_engines=5, num_nodes=2, **options)
    assert num_engine_nodes([HEAD], cpu_node(4), nodes_per_engine=2) == 2


def test_accelerator_engines_are_not_placed_on_cpus():
    options = {"num_engines": 1, "accelerators_per_engine": 1, "num_nodes": 1}
    with pytest.raises(
        CapacityError, match="accelerator_type any: engines need accelerators, but this machine has none"
    ):
        place(cpu_node(8), **options, accelerator_type="any")
    assert place(gpu_node(1), **options, accelerator_type="any").accelerator_type is None
    assert place(gpu_node(1), **options, accelerator_type="H100").accelerator_type == "H100"
