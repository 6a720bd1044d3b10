"""`cluster.yaml` is the output of `peagle deploy cluster`. test_cluster.py checks such files with Ray's schema."""

import re
from pathlib import Path

import pytest
import yaml

from jobs import cli
from jobs.configurations import read_configuration
from peagle.economics.price_options import configured_or_local_machine, resolve_price
from pipelines.batch.request import max_shutdown_s
from pipelines.cluster.placement import accelerator_placement, num_parts_on

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "cluster.yaml").read_text()


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load(TEXT)


@pytest.fixture(scope="module")
def job():
    return read_configuration(ROOT / "examples/job.yaml")


def test_cluster_yaml_is_up_to_date(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command = re.search(r"^# Written by: peagle (.*)$", TEXT, re.MULTILINE)[1]
    assert cli.run(command.split()) == 0
    assert capsys.readouterr().out == TEXT


def test_gpu_workers_are_autoscaled(cluster):
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"]["GPU"] == 0
    assert types["engines"]["min_workers"] == 0
    assert types["engines"]["max_workers"] == cluster["max_workers"] == 1


def test_job_has_the_price_of_the_machines(cluster, job):
    hardware, _ = configured_or_local_machine(job, job.accelerator_type, num_accelerators=1)
    price = resolve_price(job, hardware)
    node = cluster["available_node_types"]["engines"]
    assert (price.instance_type, price.market) == (
        node["node_config"]["InstanceType"],
        node["node_config"]["InstanceMarketOptions"]["MarketType"],
    )
    assert (price.provider, price.region) == (cluster["provider"]["type"], cluster["provider"]["region"])
    assert price.num_devices == node["resources"]["GPU"]


def test_engines_of_the_job_fit_one_machine(cluster, job):
    engine = accelerator_placement(1, accelerator_type=job.accelerator_type)
    types = {name: node["resources"] for name, node in cluster["available_node_types"].items()}
    assert {name: num_parts_on(node, engine) for name, node in types.items()} == {
        "head": 0,
        "engines": int(job.engines),
    }
    assert job.cluster_wait_s > 0
    assert job.input.startswith("s3://")
    assert str(job.output).startswith("s3://")


def test_command_in_cluster_yaml_works_with_dry_run(chat_target, write_jsonl, tmp_path, monkeypatch, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    arguments = re.search(r"python -m jobs\.(generate .*)$", TEXT, re.MULTILINE)[1].split()
    corpus = write_jsonl([{"code": "def f(): ..."}] * 10)
    local_flags = ["--input", str(corpus), "--output", str(tmp_path / "run"), "--model", str(chat_target)]
    assert cli.run([*arguments, *local_flags, "--max-model-len", "500", "--max-tokens", "100", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "8 x H100 80GB HBM3" in output
    assert "(p5.48xlarge, spot, aws us-east-1; stated)" in output
    assert "budget" in output
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def node_configs(cluster):
    return [node["node_config"] for node in cluster["available_node_types"].values()]


def test_nodes_require_the_token(cluster):
    assert cluster["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in cluster["setup_commands"])
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        (start,) = (command for command in commands if "ray start" in command)
        assert re.search(r"umask 077; set -a; \. \S+/deploy/ray\.env; .*; set \+a; \S+/ray start", start)
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]


def test_jobs_have_path_and_grace_period(cluster, job):
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        exported = commands[-1].partition("set -a; ")[2].partition("; set +a")[0].split("; ")
        assert "PATH=/home/ubuntu/peagle/.venv/bin:$PATH" in exported
        (stop_s,) = (word.partition("=")[2] for word in exported if word.startswith("RAY_JOB_STOP_WAIT_TIME_S"))
        assert float(stop_s) > max_shutdown_s(job.grace_s)


def test_instance_credentials_are_not_reachable_from_containers(node_configs):
    for node in node_configs:
        assert node["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_nodes_do_not_use_rays_insecure_defaults(node_configs):
    """Ray's defaults are SSH open to everyone, all rights to EC2 and S3, and unencrypted disks."""
    for node in node_configs:
        assert node["SecurityGroupIds"] == ["sg-REPLACE-ME"]
        assert node["IamInstanceProfile"]["Arn"].endswith(("/peagle-head", "/peagle-worker"))
        assert all(disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"])


def test_no_storage_is_mounted_without_tls(cluster):
    assert not [command for command in cluster["setup_commands"] if "mount" in command]


def test_documented_commands_use_the_token():
    """Every `ray start` in the docs uses the token, through deploy/ray.env or RAY_AUTH_MODE."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.*"), ROOT / "cluster.yaml"]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    starts = [line for line in lines if re.search(r"ray start (--head|--address|\.\.\.)", line)]
    assert len(starts) >= 4
    assert [line for line in starts if "ray.env" not in line and "RAY_AUTH_MODE=token" not in line] == []
    clients = [line for line in lines if re.search(r"(^|`)(.*)(ray job submit|serve deploy|ray status) ", line)]
    assert len(clients) >= 4
    assert [line for line in clients if "RAY_AUTH_MODE=token" not in line] == []
