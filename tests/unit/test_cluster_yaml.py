"""`cluster.yaml` against the schema of Ray's own autoscaler."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def test_it_is_valid_by_rays_schema(cluster):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)


def test_gpu_workers_exist_only_while_there_is_work(cluster):
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"]["GPU"] == 0
    workers = {name: node for name, node in types.items() if name != cluster["head_node_type"]}
    assert set(workers) == {"g7e", "p5"}
    for node in workers.values():
        assert node["min_workers"] == 0
        assert node["resources"]["GPU"] >= 1
        assert 1 <= node["max_workers"] <= cluster["max_workers"]


def test_its_instances_have_a_price(cluster):
    from peagle.economics.prices import PriceTable

    table = PriceTable.load()
    region = cluster["provider"]["region"]
    for name in ("g7e", "p5"):
        instance = cluster["available_node_types"][name]["node_config"]["InstanceType"]
        price = table.price(instance, market="spot", provider="aws", region=region)
        assert price.num_devices == cluster["available_node_types"][name]["resources"]["GPU"]


def test_its_command_waits_for_accelerators_that_one_of_its_node_types_has(cluster):
    from pipelines.batch.placing import on_accelerators, room_on

    kind = re.search(r"--accelerator-type (\S+) --cluster-wait-s \d", (ROOT / "cluster.yaml").read_text())[1]
    engine = on_accelerators(1, accelerator_type=kind)
    types = {name: node["resources"] for name, node in cluster["available_node_types"].items()}
    assert {name: room_on(node, engine) for name, node in types.items()} == {"head": 0, "g7e": 1, "p5": 0}
    assert room_on(types["p5"], on_accelerators(1, accelerator_type="H100")) == 8
