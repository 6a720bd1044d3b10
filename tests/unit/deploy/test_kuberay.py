import json
import os
import stat
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from jobs import flags
from jobs.deploying import read_workload
from peagle.deploy.kuberay import MAX_NAME_LENGTH, KubeRayOptions, PodOptions, manifests, secret_commands
from peagle.errors import ConfigError
from pipelines.batch.config import GenerateConfig
from pipelines.online.config import ServeConfig
from pipelines.online.serve.proxy import ENVIRONMENT

ROOT = Path(__file__).parents[3]
CRDS = json.loads((Path(__file__).parent / "kuberay_crds.json").read_text())
POD_OPTIONS = PodOptions(
    image="registry.example/peagle:1", claim="weights", env_secrets=["peagle-aws"], service_account=None,
    token_secret="peagle-ray",
)  # fmt: skip


def make_objects(path, pods=POD_OPTIONS, **options):
    workload = read_workload(path, None, max_name_length=MAX_NAME_LENGTH)
    return manifests(workload, KubeRayOptions(pods=pods, env=ENVIRONMENT, **options))


def job_objects(**options):
    return make_objects(ROOT / "examples/job.yaml", **options)


def service_objects(**options):
    return make_objects(ROOT / "examples/serve.yaml", **options)


def test_objects_match_kuberay_schemas():
    nightly_objects = job_objects(schedule="0 2 * * *", time_zone="Etc/UTC")
    for item in [*job_objects()[1:], *nightly_objects[1:], *service_objects()]:  # without the ConfigMaps
        jsonschema.validate(item, {"$ref": f"#/$defs/{item['kind']}", "$defs": CRDS["$defs"]})


def pod_specs(cluster):
    """Return the pod specs of the head and of the workers."""
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    return head["template"]["spec"], workers["template"]["spec"]


def test_job_has_the_configuration_and_one_pod_per_machine(tmp_path):
    config_map, ray_job = job_objects()
    cluster = ray_job["spec"]["rayClusterSpec"]
    head, worker = pod_specs(cluster)
    (tmp_path / "job.yaml").write_text(config_map["data"]["job.yaml"])
    deployed_config, example_config = (
        flags.load_file(GenerateConfig, folder / "job.yaml") for folder in (tmp_path, ROOT / "examples")
    )
    assert deployed_config == example_config
    assert cluster["rayVersion"] == ray.__version__
    group = cluster["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == (1, 1)
    assert "enableInTreeAutoscaling" not in cluster
    assert worker["containers"][0]["resources"]["limits"] == {"cpu": "172", "memory": "1740Gi", "nvidia.com/gpu": "8"}
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert worker["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert ray_job["spec"]["shutdownAfterJobFinishes"] is True


def test_pods_have_shared_memory_a_volume_and_few_privileges():
    for spec in (
        *pod_specs(job_objects()[1]["spec"]["rayClusterSpec"]),
        *pod_specs(service_objects()[0]["spec"]["rayClusterConfig"]),
    ):
        (container,) = spec["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in json.loads(json.dumps(spec["volumes"]))}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[mounts["/mnt/peagle"]] == {"persistentVolumeClaim": {"claimName": "weights"}}
        folders = {"HF_HOME": "/mnt/peagle/huggingface", "PEAGLE_HOME": "/mnt/peagle/home"}
        assert folders.items() <= {variable["name"]: variable["value"] for variable in container["env"]}.items()
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_secrets_are_referenced_but_not_written(tmp_path):
    for cluster in (job_objects()[1]["spec"]["rayClusterSpec"], service_objects()[0]["spec"]["rayClusterConfig"]):
        assert cluster["authOptions"] == {"mode": "token", "secretName": "peagle-ray"}
        assert pod_specs(cluster)[1]["containers"][0]["envFrom"] == [{"secretRef": {"name": "peagle-aws"}}]
    workload = read_workload(ROOT / "examples/serve.yaml", None, max_name_length=MAX_NAME_LENGTH)
    commands = secret_commands(workload, KubeRayOptions(pods=POD_OPTIONS, env={}, namespace="team"))
    assert [command.split()[6] for command in commands] == ["peagle-ray", "peagle-keys", "peagle-aws"]
    assert all("-n team" in command for command in commands)


@pytest.mark.parametrize(
    ("instance_type", "labels", "taints"),
    [
        ("p5.48xlarge", {"eks.amazonaws.com/capacityType", "karpenter.sh/capacity-type"}, set()),
        ("a3-highgpu-8g", {"cloud.google.com/gke-spot"}, {"cloud.google.com/gke-spot"}),
    ],
)
def test_spot_market_selects_spot_nodes(tmp_path, instance_type, labels, taints):
    path = tmp_path / "run.yaml"
    text = f"input: s3://b/in\noutput: s3://b/out\ninstance_type: {instance_type}\nmarket: "
    path.write_text(text + "spot\n")
    worker = pod_specs(make_objects(path)[1]["spec"]["rayClusterSpec"])[1]
    required = worker["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {term["matchExpressions"][0]["key"] for term in required["nodeSelectorTerms"]} == labels
    assert {toleration["key"] for toleration in worker["tolerations"]} == {"nvidia.com/gpu", *taints}
    path.write_text(text + "on_demand\nregion: " + ("us-east-1\n" if instance_type.startswith("p5") else "us-east4\n"))
    assert "affinity" not in pod_specs(make_objects(path)[1]["spec"]["rayClusterSpec"])[1]


def test_engine_range_enables_autoscaling(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("input: s3://b/in\noutput: s3://b/out\ninstance_type: g7e.2xlarge\nengines: 1:4\n")
    cluster = make_objects(path)[1]["spec"]["rayClusterSpec"]
    group = cluster["workerGroupSpecs"][0]
    assert (cluster["enableInTreeAutoscaling"], group["minReplicas"], group["maxReplicas"]) == (True, 1, 4)


def test_each_scheduled_run_writes_to_its_own_folder():
    config_map, cron_job = job_objects(schedule="0 2 * * *", time_zone="Etc/UTC")
    assert (cron_job["kind"], cron_job["spec"]["schedule"], cron_job["spec"]["timeZone"]) == (
        "RayCronJob", "0 2 * * *", "Etc/UTC",
    )  # fmt: skip
    assert cron_job["spec"]["jobTemplate"] == job_objects()[1]["spec"]
    assert 's3://my-bucket/runs/unit-tests/"${RAY_CLUSTER_NAME%-*}"' in config_map["data"]["run.sh"]


def test_service_has_a_serve_config_and_the_keys_of_a_secret():
    (ray_service,) = service_objects()
    schema = ServeDeploySchema.model_validate(yaml.safe_load(ray_service["spec"]["serveConfigV2"]))
    (application,) = schema.applications
    config = ServeConfig(**application.args)
    assert [model.served_name for model in config.served] == ["coder", "coder-plain"]
    assert (str(config.keys), str(config.state)) == ("/etc/peagle-keys/keys.json", "/mnt/peagle/peagle-serve")
    assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", 8000)
    head, worker = pod_specs(ray_service["spec"]["rayClusterConfig"])
    assert "ports" not in head["containers"][0]  # otherwise KubeRay would add no default ports to its Service
    for spec in (head, worker):  # the ingress might run on the head or on a worker
        assert {"name": "etc-peagle-keys", "mountPath": "/etc/peagle-keys"} in spec["containers"][0]["volumeMounts"]
        env = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
        assert env.items() >= ENVIRONMENT.items()
    group = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == (4, 4)
    assert head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "15"]
    assert head["terminationGracePeriodSeconds"] > 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instance_type: g7e.2xlarge\n", "the configuration has no keys"),
        ("instance_type: g7e.2xlarge\nkeys: k.json\ntls_cert: c\ntls_key: k\n", "the Ingress has the certificate"),
        ("instance_type: g7e.2xlarge\nkeys: k.json\nbatches: runs/batches\n", "batches .*: a local path"),
        ("input: in.jsonl\noutput: s3://b/o\ninstance_type: g7e.2xlarge\n", "input in.jsonl: a local path"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path, text, message):
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_objects(tmp_path / "some.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": -1}, "must be 0 or more"),
        ({"time_zone": "Etc/UTC"}, "--time-zone requires --schedule"),
        ({"schedule": "nightly"}, "cron needs five fields"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        job_objects(**options)


def test_schedule_is_only_for_bulk_runs():
    assert job_objects(schedule="@daily")[1]["kind"] == "RayCronJob"
    with pytest.raises(ConfigError, match="--schedule is for bulk runs"):
        service_objects(schedule="0 2 * * *")


@pytest.fixture
def start_script(tmp_path):
    """Return a function that starts a script of a job with fake commands.

    The function has a method `calls`, which returns the commands that were called.
    """
    scripts = job_objects(schedule="0 2 * * *")[0]["data"]
    folder = tmp_path / "bin"
    folder.mkdir()
    calls_file = tmp_path / "calls"

    def write_fake_command(name, body):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $@" >> {calls_file}\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    for name in ("run.sh", "stop.sh"):
        text = scripts[name].replace("/tmp/peagle.pid", str(tmp_path / "pid"))
        (tmp_path / name).write_text(text)
    write_fake_command("ray", f'echo "address $RAY_API_SERVER_ADDRESS" >> {calls_file}')
    write_fake_command("sleep", "/bin/sleep 0.1")
    path = f"{folder}:{Path(os.sys.executable).parent}:/usr/bin:/bin"
    env = {"PATH": path, "RAY_CLUSTER_NAME": "job-29400000-x7k2p"}

    def start(name, peagle=None):
        if peagle is not None:
            write_fake_command("peagle", peagle)
        return subprocess.Popen(["sh", str(tmp_path / name)], env=env)

    start.calls = lambda: calls_file.read_text().splitlines() if calls_file.exists() else []
    return start


@pytest.mark.parametrize("code", [0, 1, 3])
def test_job_script_has_the_exit_code_of_the_run(start_script, code):
    assert start_script("run.sh", f"exit {code}").wait(20) == code
    assert start_script.calls() == [
        "peagle generate --config /etc/peagle/job.yaml --output s3://my-bucket/runs/unit-tests/job-29400000"
    ]


def test_job_with_an_invalid_configuration_is_stopped_and_not_retried(start_script):
    assert start_script("run.sh", "exit 2").wait(20) == 2
    stop_calls = ["ray job stop --no-wait peagle-job", "address http://127.0.0.1:8265"]
    assert start_script.calls()[1:] == [*stop_calls, "sleep 60"]


def test_pre_stop_hook_waits_for_the_run(start_script, tmp_path):
    assert start_script("stop.sh").wait(20) == 0, "the hook failed before the run had started"
    run = start_script("run.sh", "trap 'exit 3' TERM; while :; do /bin/sleep 0.05; done")
    try:
        while not start_script.calls() or not (tmp_path / "pid").exists():
            assert run.poll() is None
            time.sleep(0.05)
        assert start_script("stop.sh").wait(20) == 0
        assert run.wait(20) == 3
    finally:
        run.kill()
