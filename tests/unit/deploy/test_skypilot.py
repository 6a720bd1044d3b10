import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from jobs import flags
from jobs.deploying import read_workload
from peagle.deploy.skypilot import head_of, launch, secrets_of, task
from peagle.errors import ConfigError
from pipelines.batch.config import GenerateConfig
from pipelines.online.config import ServeConfig

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((Path(__file__).parent / "skypilot_schema.json").read_text())["$defs"]
JOB = "input: s3://b/in\noutput: s3://b/out\ninstance_type: g7e.2xlarge\n"
SERVE = "keys: keys.json\ninstance_type: g7e.2xlarge\n"


def check(one):
    jsonschema.validate(one, SCHEMA["task"])
    for part in ("resources", "service"):
        jsonschema.validate(one.get(part, {}), SCHEMA[part])


def configuration(one, home):
    """The configuration that the machine reads, as its set-up writes it."""
    script = "cat > " + one["setup"].partition("cat > ")[2].partition("\n.venv")[0]
    home.mkdir(exist_ok=True)
    subprocess.run([shutil.which("sh"), "-c", script], check=True, env={"HOME": str(home), "PATH": "/usr/bin:/bin"})
    return home / "peagle.yaml"


def test_a_bulk_run_is_a_task_on_the_machine_of_its_price(tmp_path):
    path = ROOT / "examples/job.yaml"
    one = task(read_workload(path, None, most_of_name=50), secrets=["HF_TOKEN"])
    check(one)
    assert one["resources"] == {
        "infra": "aws/us-east-1",
        "instance_type": "p5.48xlarge",
        "accelerators": {"H100": 8},
        "use_spot": True,
        "disk_size": 500,
    }
    assert one["secrets"] == {"HF_TOKEN": None}
    assert "make setup LOCK=cuda" in one["setup"]
    assert one["run"].endswith("peagle generate --config ~/peagle.yaml\n")
    assert flags.load_file(GenerateConfig, configuration(one, tmp_path / "home")) == flags.load_file(
        GenerateConfig, path
    )


def test_engines_on_several_machines_are_a_task_of_several_nodes_with_one_token(workload):
    one = workload(f"{JOB}engines: 3\n")
    secrets = secrets_of(one, ["HF_TOKEN"])
    content = task(one, secrets=secrets)
    check(content)
    assert content["num_nodes"] == 3
    assert content["secrets"] == {"HF_TOKEN": None, "RAY_AUTH_TOKEN": None}
    assert secrets_of(one, secrets) == secrets
    commands = head_of(one, config="team.yaml", output="t.yaml", secrets=secrets)
    assert "3 g7e.2xlarge" in commands
    assert commands.index("export RAY_AUTH_TOKEN=$(openssl rand -hex 32)") < commands.index("sky jobs launch")
    single = workload(f"{JOB}engines: 1:3\n")
    assert secrets_of(single, []) == []
    assert "num_nodes" not in task(single)


STUBS = {
    "ray": """echo "ray $1 ${{2#--address=}}" >> {log}
case "$1" in
  status) test -e {up};;
  start) case "$*" in
    *--head*) trap 'rm {up}; exit 0' TERM; touch {up}; while :; do sleep 0.1; done;;
    *) {node};;
  esac;;
esac""",
    "python": 'test "$3" = 2',
    "peagle": 'echo "peagle $* at $RAY_ADDRESS with $RAY_AUTH_MODE" >> {log}; exit 3',
    "sleep": "exec /bin/sleep 0.1",
}


@pytest.mark.parametrize(
    ("rank", "is_up", "node", "code"),
    [
        ("0", False, "", 3),
        ("1", True, "rm {up}", 0),  # the head has ended, and with it this machine's Ray
        ("1", True, "true", 1),
    ],
)
def test_what_each_of_several_machines_does(workload, tmp_path, rank, is_up, node, code):
    log, up, commands = tmp_path / "log", tmp_path / "up", tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name, text in STUBS.items():
        (commands / name).write_text("#!/bin/bash\n" + text.format(log=log, up=up, node=node.format(up=up)) + "\n")
        (commands / name).chmod(0o755)
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/ray.env", tmp_path / "deploy")
    if is_up:
        up.touch()
    variables = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2"}
    script = task(workload(f"{JOB}engines: 2\n"))["run"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(["/bin/bash", "-c", script], check=False, cwd=tmp_path, env=environment, timeout=30)
    assert done.returncode == code
    assert not (rank == "0" and up.exists())  # its Ray has ended
    said = log.read_text()
    assert ("peagle generate" in said) == (rank == "0")
    if rank == "0":
        assert f"peagle generate --config {tmp_path}/peagle.yaml at 10.0.0.7:6379 with token" in said
    else:
        assert "ray start 10.0.0.7:6379" in said


def test_an_endpoint_is_a_service_behind_skypilots_balancer(workload, tmp_path):
    one = task(workload(f"{SERVE}model: Org/model\nrequest_timeout_s: 900\nstate: /srv/state\n"))
    check(one)
    assert one["resources"]["ports"] == 8000
    assert one["service"]["readiness_probe"]["path"] == "/health"
    assert one["service"]["load_balancer"] == {"stream_timeout_seconds": 900}
    assert one["file_mounts"] == {"~/keys.json": "keys.json"}
    assert "secrets" not in one
    config = flags.load_file(ServeConfig, configuration(one, tmp_path / "home"))
    assert (config.host, config.port, config.model, config.request_timeout_s) == ("0.0.0.0", 8000, "Org/model", 900)
    assert (config.keys, config.state) == (Path("~/keys.json").expanduser(), Path("runs/serve"))
    assert one["run"].endswith("peagle serve --config ~/peagle.yaml\n")


def test_a_machine_of_any_region_and_market_and_without_accelerators(workload):
    resources = task(workload(JOB))["resources"]
    assert (resources["infra"], resources["use_spot"]) == ("aws", False)
    on_cpus = task(workload("input: s3://b/in\noutput: s3://b/out\ninstance_type: c7a.large\n"))
    check(on_cpus)
    assert "accelerators" not in on_cpus["resources"]
    assert "make setup LOCK=cpu" in on_cpus["setup"]


def test_the_names_of_every_provider_are_skypilots(workload):
    for machine in ("p5.48xlarge", "a3-highgpu-8g", "gpu_8x_h100_sxm5", "gpu-h100-sxm_8gpu-128vcpu-1600gb"):
        one = task(workload(f"input: s3://b/in\noutput: s3://b/out\ninstance_type: {machine}\nengines: 1:9\n"))
        check(one)
        assert one["resources"]["accelerators"] == {"H100": 8}


def test_its_first_lines_have_the_commands_that_launch_and_end_it(workload):
    for text, words in (
        (JOB, ["sky jobs launch --detach-run --secret HF_TOKEN t.yaml", "sky jobs cancel --name peagle-team"]),
        (SERVE, ["sky serve up --service-name peagle-team --secret HF_TOKEN t.yaml", "sky serve down peagle-team"]),
    ):
        one = workload(text)
        head = head_of(one, config="team.yaml", output="t.yaml", secrets=["HF_TOKEN"])
        commands = [line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   ")]
        assert (commands[0], commands[-1]) == tuple(words)
        assert commands[0].split() == launch(one, "t.yaml", secrets=["HF_TOKEN"])
        assert yaml.safe_load(head) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("instance_type: g7e.2xlarge\n", "names no file of keys"),
        (f"{SERVE}tls_cert: c\ntls_key: k\n", "balancer has the certificate"),
        (f"{SERVE}batches: /mnt/peagle/batches\n", "batches .*: it is a path of this machine"),
        (f"{SERVE}max_replicas: 4\n", "its engines take 4 machines of type g7e.2xlarge"),
        (JOB.replace("s3://b/in", "in.jsonl"), "input in.jsonl: it is a path of this machine"),
    ],
)
def test_what_one_machine_elsewhere_cannot_have_is_refused(workload, text, said):
    with pytest.raises(ConfigError, match=said):
        task(workload(text))


def test_a_secret_is_a_name_and_its_value_is_not_repeated(workload):
    with pytest.raises(ConfigError) as error:
        task(workload(JOB), secrets=["HF_TOKEN=hf_abc"])
    assert "hf_abc" not in str(error.value)
