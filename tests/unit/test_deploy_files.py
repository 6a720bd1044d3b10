"""The files in deploy/ are valid."""

import json
import subprocess
from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import max_shutdown_s
from pipelines.cluster.ray import NODE_ENVIRONMENT
from pipelines.online.config import ServeConfig
from pipelines.online.serve import proxy

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_serve_yaml_is_valid():
    schema = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "serve.yaml").read_text()))
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == ("pipelines.online.app", "build")
    served = [model.served_name for model in ServeConfig(**application.args).served]
    assert served == ["smollm2-135m", "smollm2-135m-plain"]


def test_ray_env_has_the_variables_of_peagle_serve():
    script = f"set -a; . {DEPLOY / 'ray.env'}; set +a; env -0"
    result = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    variables = dict(line.split("=", 1) for line in result.stdout.split("\0") if line.startswith("RAY_"))
    stop_s = float(variables.pop("RAY_JOB_STOP_WAIT_TIME_S"))
    assert stop_s > max_shutdown_s(GenerateConfig.model_fields["grace_s"].default)
    assert variables == {"RAY_AUTH_MODE": "token", **NODE_ENVIRONMENT, **proxy.ENVIRONMENT}


def statements(name):
    return json.loads((DEPLOY / "aws" / name).read_text())["Statement"]


def test_head_node_can_only_terminate_its_own_machines():
    by_sid = {statement["Sid"]: statement for statement in statements("peagle-head.json")}
    terminate = by_sid["EndMachinesOfThisCluster"]
    assert terminate["Condition"] == {"StringLike": {"aws:ResourceTag/ray-cluster-name": "peagle-*"}}
    cluster = yaml.safe_load((DEPLOY.parent / "cluster.yaml").read_text())
    assert cluster["cluster_name"].startswith("peagle-")
    role = cluster["available_node_types"]["engines"]["node_config"]["IamInstanceProfile"]["Arn"].rpartition("/")[2]
    assert by_sid["GiveWorkersTheirRole"]["Resource"].endswith(f":role/{role}")
    actions_on_all = [
        action for statement in by_sid.values() if statement["Resource"] == "*" for action in statement["Action"]
    ]
    assert all(action.startswith("ec2:Describe") for action in actions_on_all)
    assert not [action for statement in by_sid.values() for action in statement["Action"] if "*" in action]


def test_s3_permissions_are_limited_to_the_bucket():
    permissions = statements("bucket.json")
    assert {statement["Resource"] for statement in permissions} == {"arn:aws:s3:::BUCKET/*", "arn:aws:s3:::BUCKET"}
    actions = {action for statement in permissions for action in statement["Action"]}
    required = {
        "GetObject",
        "PutObject",
        "DeleteObject",
        "AbortMultipartUpload",
        "ListBucket",
        "ListBucketMultipartUploads",
    }
    assert actions >= {f"s3:{action}" for action in required}
    assert "s3:*" not in actions
