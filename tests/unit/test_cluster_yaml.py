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
    from pipelines.cluster.placement import on_accelerators, room_on

    kind = re.search(r"--accelerator-type (\S+) --cluster-wait-s \d", (ROOT / "cluster.yaml").read_text())[1]
    engine = on_accelerators(1, accelerator_type=kind)
    types = {name: node["resources"] for name, node in cluster["available_node_types"].items()}
    assert {name: room_on(node, engine) for name, node in types.items()} == {"head": 0, "g7e": 1, "p5": 0}
    assert room_on(types["p5"], on_accelerators(1, accelerator_type="H100")) == 8


def test_its_command_states_the_price_of_the_nodes_that_it_asks_for(cluster):
    text = (ROOT / "cluster.yaml").read_text()
    name, market, region = re.search(r"--instance-type (\S+) --market (\S+) --region (\S+)", text).groups()
    node = cluster["available_node_types"]["g7e"]["node_config"]
    assert (name, market) == (node["InstanceType"], node["InstanceMarketOptions"]["MarketType"])
    assert region == cluster["provider"]["region"]


@pytest.fixture(scope="module")
def node_configs(cluster):
    return [node["node_config"] for node in cluster["available_node_types"].values()]


def test_each_node_has_the_token_and_starts_with_none_else(cluster):
    assert cluster["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in cluster["setup_commands"])
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        (start,) = (command for command in commands if "ray start" in command)
        assert re.search(r"umask 077; set -a; \. \S+/deploy/ray\.env; set \+a; \S+/ray start", start)
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]


def test_every_command_of_its_comments_that_talks_to_ray_presents_the_token():
    text = (ROOT / "cluster.yaml").read_text()
    assert re.findall(r"^#   (.*)ray job submit", text, re.MULTILINE) == [
        "RAY_AUTH_MODE=token RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 "
    ]


def test_credentials_of_a_machine_are_for_its_own_processes(node_configs):
    for node in node_configs:
        assert node["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_no_node_has_what_ray_would_give_it_by_itself(node_configs):
    """SSH open to everybody, all rights to EC2 and S3, disks that are not encrypted."""
    for node in node_configs:
        assert node["SecurityGroupIds"] == ["sg-REPLACE-ME"]
        assert node["IamInstanceProfile"]["Arn"].endswith(("/peagle-head", "/peagle-worker"))
        assert all(disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"])


def test_no_storage_is_mounted_without_tls(cluster):
    assert not [command for command in cluster["setup_commands"] if "mount" in command]


def test_the_start_of_the_documentation_is_the_one_of_ray_env():
    """Wherever `ray start` is shown, the token is: by deploy/ray.env, or by the variable itself."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").iterdir(), ROOT / "cluster.yaml"]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    starts = [line for line in lines if re.search(r"ray start (--head|--address|\.\.\.)", line)]
    assert len(starts) >= 4
    assert [line for line in starts if "ray.env" not in line and "RAY_AUTH_MODE=token" not in line] == []
    clients = [line for line in lines if re.search(r"(^|`)(.*)(ray job submit|serve deploy|ray status) ", line)]
    assert len(clients) >= 4
    assert [line for line in clients if "RAY_AUTH_MODE=token" not in line] == []
