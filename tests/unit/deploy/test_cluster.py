import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml

from peagle.deploy.cluster import AwsNames, cluster, cluster_file
from peagle.errors import ConfigError

S3 = "input: s3://b/in\noutput: s3://b/out\n"


def engine_node_type(workload):
    file = yaml.safe_load(cluster_file(workload, AwsNames(), config="run.yaml", output="c.yaml"))
    assert file == cluster(workload, AwsNames())
    jsonschema.validate(file, json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))
    return file["available_node_types"]["engines"]


def test_minimum_workers_without_accelerator_request(workload):
    text = f"{S3}instance_type: g7e.2xlarge\nregion: us-east-1\nengines: 2:5\n"
    engines = engine_node_type(workload(text))
    assert (engines["min_workers"], engines["max_workers"]) == (2, 5)
    assert "accelerator_type" not in str(engines["resources"])
    assert "InstanceMarketOptions" not in engines["node_config"]
    with_request = engine_node_type(
        workload(f"{text}accelerator_type: RTX-PRO-6000\ncluster_wait_s: 900\nmarket: spot\n")
    )
    assert (with_request["min_workers"], with_request["resources"]["accelerator_type:RTX-PRO-6000"]) == (0, 1)
    assert with_request["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}


@pytest.mark.parametrize(("machine", "lock"), [("g7e.2xlarge", "cuda"), ("c7a.large", "cpu")])
def test_machine_type_selects_vllm_build(workload, machine, lock):
    setup_commands = cluster(workload(f"{S3}instance_type: {machine}\n"), AwsNames())["setup_commands"]
    assert f"make setup LOCK={lock} PYTHON=python3.12" in setup_commands[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: keys.json\ninstance_type: g7e.2xlarge\n", "does not set up a folder that all nodes share"),
        (f"{S3}instance_type: a3-highgpu-8g\n", "a3-highgpu-8g is a machine of gcp, but the file is for AWS"),
        ("input: in.jsonl\noutput: s3://b/o\ninstance_type: g7e.2xlarge\n", "input in.jsonl: a local path"),
    ],
)
def test_unsupported_configurations_are_refused(workload, text, message):
    with pytest.raises(ConfigError, match=message):
        engine_node_type(workload(text))


def test_account_names_are_inserted(workload):
    names = AwsNames(image="ami-1", security_group="sg-1", head_profile="arn:h", worker_profile="arn:w")
    assert (names.missing, len(AwsNames().missing)) == ([], 4)
    settings = cluster(workload(f"{S3}instance_type: g7e.2xlarge\n"), names)["available_node_types"]
    assert settings["head"]["node_config"]["IamInstanceProfile"] == {"Arn": "arn:h"}
    assert settings["engines"]["node_config"]["IamInstanceProfile"] == {"Arn": "arn:w"}
    assert "REPLACE-ME" not in str(settings)
