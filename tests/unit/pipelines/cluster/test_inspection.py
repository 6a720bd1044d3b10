import os
from types import SimpleNamespace

import pytest
from devices import cpu, gpu

from pipelines.cluster import inspection


def test_node_labels_are_machine_names(monkeypatch):
    import ray

    labels = {
        "ray.io/node-id": "ab" * 28,
        "ray.io/node-group": "workers",
        "ray.io/availability-region": "us-east-1",
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "instance-type": "workers",
    }
    node = cpu(machine_names=("m7i.large",))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_labels=lambda: labels))
    monkeypatch.setattr(inspection, "detect_machine", lambda: node)
    assert inspection._detect().machine_names == ("m7i.large", "workers", "us-east-1", "p5.48xlarge")


@pytest.mark.parametrize(("extra_resources", "num_found_gpus"), [({}, 8), ({"GPU": 4.0}, 4)])
def test_inspection_sees_all_accelerators_without_reserving_one(monkeypatch, extra_resources, num_found_gpus):
    import ray

    node = gpu(num_accelerators=8)
    probe_options = {}

    class Probe:
        def remote(self):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # Ray might set this for a task without accelerators
            return inspection._detect()

    def remote(**options):
        probe_options.update(options)
        return lambda function: Probe()

    nodes = [
        {"NodeID": "ab" * 28, "Alive": True, "Resources": {"CPU": 4.0}},
        {"NodeID": "cd" * 28, "Alive": True, "Resources": {"CPU": 192.0, **extra_resources}},
        {"NodeID": "ef" * 28, "Alive": False, "Resources": {"CPU": 8.0, "GPU": 1.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get", lambda result: result)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_labels=dict))
    monkeypatch.setattr(inspection, "detect_machine", lambda: None if "CUDA_VISIBLE_DEVICES" in os.environ else node)
    assert inspection.inspect().num_accelerators == num_found_gpus
    assert probe_options.get("num_gpus", 0) == 0
    chosen = probe_options.get("scheduling_strategy")
    assert (chosen and chosen.node_id) == ("cd" * 28 if extra_resources else None)


def test_inspection_uses_visible_devices_of_the_raylet(monkeypatch):
    """`ray start` might be limited to one kind of GPU on a node with mixed GPUs."""
    raylet = SimpleNamespace(environ=lambda: {"CUDA_VISIBLE_DEVICES": "0,1"})
    monkeypatch.setattr(inspection.psutil, "Process", lambda pid: raylet if pid == os.getppid() else None)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_labels=dict))
    visible_devices = []
    monkeypatch.setattr(
        inspection, "detect_machine", lambda: visible_devices.append(os.environ["CUDA_VISIBLE_DEVICES"]) or cpu()
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # Ray might set this for a task without accelerators
    inspection._detect()
    assert visible_devices == ["0,1"]
