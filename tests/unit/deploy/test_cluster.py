import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml

from peagle.deploy.cluster import AwsNames, cluster, cluster_file
from peagle.errors import ConfigError

S3 = "input: s3://b/in\noutput: s3://b/out\n"


def made(workload):
    found = yaml.safe_load(cluster_file(workload, AwsNames(), config="run.yaml", output="c.yaml"))
    assert found == cluster(workload, AwsNames())
    jsonschema.validate(found, json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))
    return found["available_node_types"]["engines"]


def test_a_run_that_does_not_ask_for_machines_has_them_from_the_start(workload):
    keys = f"{S3}instance_type: g7e.2xlarge\nregion: us-east-1\nengines: 2:5\n"
    engines = made(workload(keys))
    assert (engines["min_workers"], engines["max_workers"]) == (2, 5)
    assert "accelerator_type" not in str(engines["resources"])
    assert "InstanceMarketOptions" not in engines["node_config"]
    asking = made(workload(f"{keys}accelerator_type: RTX-PRO-6000\ncluster_wait_s: 900\nmarket: spot\n"))
    assert (asking["min_workers"], asking["resources"]["accelerator_type:RTX-PRO-6000"]) == (0, 1)
    assert asking["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}


@pytest.mark.parametrize(("machine", "lock"), [("g7e.2xlarge", "cuda"), ("c7a.large", "cpu")])
def test_each_kind_of_machine_gets_the_vllm_that_runs_on_it(workload, machine, lock):
    set_up = cluster(workload(f"{S3}instance_type: {machine}\n"), AwsNames())["setup_commands"]
    assert f"make setup LOCK={lock} PYTHON=python3.12" in set_up[-1]


def test_a_stop_waits_for_the_grace_of_the_run(workload):
    found = cluster(workload(f"{S3}instance_type: g7e.2xlarge\ngrace_s: 300\n"), AwsNames())
    for commands in (found["head_start_ray_commands"], found["worker_start_ray_commands"]):
        assert "RAY_JOB_STOP_WAIT_TIME_S=360; " in commands[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: keys.json\ninstance_type: g7e.2xlarge\n", "an endpoint's state needs a folder that all nodes share"),
        (f"{S3}instance_type: a3-highgpu-8g\n", "a3-highgpu-8g is gcp's, and this file is for AWS"),
        ("input: in.jsonl\noutput: s3://b/o\ninstance_type: g7e.2xlarge\n", "input in.jsonl: it is a path of this"),
    ],
)
def test_what_such_a_cluster_cannot_do_is_refused(workload, text, said):
    with pytest.raises(ConfigError, match=said):
        made(workload(text))


def test_names_of_an_account_stand_where_they_were_given(workload):
    names = AwsNames(image="ami-1", security_group="sg-1", head_profile="arn:h", worker_profile="arn:w")
    assert (names.missing, len(AwsNames().missing)) == ([], 4)
    found = cluster(workload(f"{S3}instance_type: g7e.2xlarge\n"), names)["available_node_types"]
    assert found["head"]["node_config"]["IamInstanceProfile"] == {"Arn": "arn:h"}
    assert found["engines"]["node_config"]["IamInstanceProfile"] == {"Arn": "arn:w"}
    assert "REPLACE-ME" not in str(found)
