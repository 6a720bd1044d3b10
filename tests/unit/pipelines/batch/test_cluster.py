import os
import socket

import pytest

from peagle.errors import CapacityError, ConfigError
from peagle.hardware import Hardware
from pipelines.batch import cluster
from pipelines.batch.cluster import PREPARE_CPUS, Placement, place, ray_cluster


def cpu_node(num_cpus):
    return Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=num_cpus)


@pytest.mark.parametrize(
    ("num_cpus", "engines", "nodes", "logical", "devices"),
    [(2, 1, 1, 1.0, 2), (2, 2, 1, 0.5, 1), (8, 2, 1, 3.0, 4), (8, 4, 2, 3.0, 4), (1, 1, 1, 0.5, 1)],
)
def test_cpu_engines_share_a_node_and_leave_room_for_what_feeds_them(num_cpus, engines, nodes, logical, devices):
    placement = place(cpu_node(num_cpus), num_engines=engines, accelerators_per_engine=1, num_nodes=nodes)
    assert (placement.num_cpus, placement.num_devices, placement.device) == (logical, devices, "vcpu")
    assert placement.num_engines_on_node * placement.num_cpus + PREPARE_CPUS <= num_cpus


def test_more_engines_than_cores_are_refused():
    with pytest.raises(CapacityError, match=r"3 engines need a CPU core each(.|\n)*--engines 2"):
        place(cpu_node(2), num_engines=3, accelerators_per_engine=1, num_nodes=1)


def test_a_gpu_engine_takes_and_pays_for_its_accelerators():
    node = Hardware(
        platform="cuda",
        accelerator="H100",
        num_accelerators=8,
        compute_capability=(9, 0),
        memory_gib=80,
        free_memory_gib=80,
        num_cpus=192,
    )
    placement = place(node, num_engines=2, accelerators_per_engine=4, num_nodes=1)
    assert (placement.num_gpus, placement.num_devices, placement.device) == (4, 4, "accelerator")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, "Ray did not start here: too slow"),
        ("10.0.0.1:6379", "cannot join the Ray cluster at 10.0.0.1:6379: too"),
    ],
)
def test_a_ray_that_does_not_come_up_is_an_error_of_ours(monkeypatch, address, message):
    import ray

    def fail(**_):
        raise Exception("too slow")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    with pytest.raises(CapacityError, match=message), ray_cluster():
        pass


def test_a_port_of_metrics_that_is_taken_is_said_before_ray_starts(monkeypatch):
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


@pytest.mark.parametrize(("asked", "found"), [(None, str(os.nice(0))), ("7", "7")])
def test_engines_are_as_nice_as_who_started_them_unless_asked_otherwise(monkeypatch, asked, found):
    import ray

    environment = {} if asked is None else {"RAY_worker_niceness": asked}
    seen = {}
    monkeypatch.setattr(ray, "init", lambda **_: seen.update(environment))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.os, "environ", environment)
    with ray_cluster():
        assert seen["RAY_worker_niceness"] == found


def test_a_node_is_shared_by_as_many_engines_as_it_can_hold_of_those_that_may_come():
    few = place(cpu_node(4), num_engines=1, accelerators_per_engine=1, num_nodes=1, most_engines=8)
    assert (few.num_engines_on_node, few.num_devices) == (4, 1)
    two_ranks = place(cpu_node(4), num_engines=1, accelerators_per_engine=2, num_nodes=1, most_engines=8)
    assert (two_ranks.num_engines_on_node, two_ranks.num_devices) == (2, 2)


def test_an_engine_with_more_ranks_than_cores_is_refused():
    with pytest.raises(CapacityError, match=r"1 engines need 4 CPU cores each(.|\n)*fewer ranks"):
        place(cpu_node(2), num_engines=1, accelerators_per_engine=4, num_nodes=1)


@pytest.mark.parametrize(("cpus", "room"), [([8.0], 7), ([9.0], 8), ([8.0, 2.0], 9), ([1.0, 0.25], 1)])
def test_room_is_what_is_left_beside_a_task_that_feeds_the_engines(monkeypatch, cpus, room):
    nodes = [{"CPU": number, "GPU": 8.0} for number in cpus]
    monkeypatch.setattr(cluster, "_nodes", lambda: nodes)
    placement = Placement(num_cpus=1, num_gpus=1, num_devices=1, device="accelerator", num_engines_on_node=1)
    assert cluster.room_for(placement) == room
