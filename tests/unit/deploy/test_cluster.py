import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml

from peagle.deploy.cluster import AwsNames, cluster, cluster_file
from peagle.errors import ConfigError

S3_PATHS = "input: s3://b/in\noutput: s3://b/out\n"


def engine_node_type(workload):
    """Return the node type of the engines in the cluster file of a workload, after checking the whole file."""
    file = yaml.safe_load(cluster_file(workload, AwsNames(), config="run.yaml", output="c.yaml"))
    assert file == cluster(workload, AwsNames())
    jsonschema.validate(file, json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))
    return file["available_node_types"]["engines"]


def test_cluster_starts_the_minimum_of_workers_unless_ray_requests_them(make_workload):
    text = f"{S3_PATHS}instance_type: g7e.2xlarge\nregion: us-east-1\nengines: 2:5\n"
    engines = engine_node_type(make_workload(text))
    assert (engines["min_workers"], engines["max_workers"]) == (2, 5)
    assert "accelerator_type" not in str(engines["resources"])
    assert "InstanceMarketOptions" not in engines["node_config"]
    with_request = engine_node_type(
        make_workload(f"{text}accelerator_type: RTX-PRO-6000\ncluster_wait_s: 900\nmarket: spot\n")
    )
    assert (with_request["min_workers"], with_request["resources"]["accelerator_type:RTX-PRO-6000"]) == (0, 1)
    assert with_request["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}


@pytest.mark.parametrize(("instance_type", "lock"), [("g7e.2xlarge", "cuda"), ("c7a.large", "cpu")])
def test_instance_type_selects_the_build_of_vllm(make_workload, instance_type, lock):
    workload = make_workload(f"{S3_PATHS}instance_type: {instance_type}\n")
    assert f"make setup LOCK={lock} PYTHON=python3.12" in cluster(workload, AwsNames())["setup_commands"][-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: keys.json\ninstance_type: g7e.2xlarge\n", "does not set up a folder that all nodes share"),
        (f"{S3_PATHS}instance_type: a3-highgpu-8g\n", "a3-highgpu-8g is a machine of gcp, but the file is for AWS"),
        ("input: in.jsonl\noutput: s3://b/o\ninstance_type: g7e.2xlarge\n", "input in.jsonl: a local path"),
    ],
)
def test_unsupported_configurations_are_refused(make_workload, text, message):
    with pytest.raises(ConfigError, match=message):
        engine_node_type(make_workload(text))


def test_names_of_the_aws_account_are_inserted(make_workload):
    names = AwsNames(image="ami-1", security_group="sg-1", head_profile="arn:h", worker_profile="arn:w")
    assert (names.missing, len(AwsNames().missing)) == ([], 4)
    node_types = cluster(make_workload(f"{S3_PATHS}instance_type: g7e.2xlarge\n"), names)["available_node_types"]
    assert node_types["head"]["node_config"]["IamInstanceProfile"] == {"Arn": "arn:h"}
    assert node_types["engines"]["node_config"]["IamInstanceProfile"] == {"Arn": "arn:w"}
    assert "REPLACE-ME" not in str(node_types)
