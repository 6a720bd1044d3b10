"""`peagle deploy`: the files that it writes, and the client programs that --apply runs."""

import json
import stat

import pytest
import yaml

from jobs import cli
from peagle.deploy.kuberay import MAX_CRON_NAME_LENGTH, MAX_NAME_LENGTH

JOB = "input: s3://b/in\noutput: s3://b/out\ninstance_type: g7e.2xlarge\nregion: us-east-1\n"
AWS_FLAGS = ["--ami", "ami-1", "--security-group", "sg-1", "--head-profile", "arn:h", "--worker-profile", "arn:w"]


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


@pytest.fixture
def install_fake_client(tmp_path, monkeypatch):
    """Return a function that replaces a client, such as kubectl, with a program that saves its arguments and input."""

    def install_fake_client(name, *, last_command="exit 0"):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n/bin/cat > {tmp_path}/input\necho made\n{last_command}\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder))

    return install_fake_client


def kuberay(*argv):
    return cli.run(["deploy", "kuberay", *argv, "--image", "i"])


def test_kuberay_prints_objects_and_required_secrets(job, capsys):
    assert kuberay(job, "--env-secret", "aws") == 0
    printed = capsys.readouterr()
    assert [item["kind"] for item in yaml.safe_load_all(printed.out)] == ["ConfigMap", "RayJob"]
    assert "kubectl create secret generic peagle-ray" in printed.err
    assert "kubectl create secret generic aws" in printed.err


def test_json_result_has_the_written_objects(job, tmp_path, capsys):
    assert kuberay(job, "--output", str(tmp_path / "sub" / "k.yaml"), "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["name"], result["num_machines"], result["is_applied"]) == ("peagle-job", [1, 1], False)
    assert list(yaml.safe_load_all((tmp_path / "sub" / "k.yaml").read_text())) == result["objects"]


def test_apply_passes_the_objects_to_kubectl(job, install_fake_client, tmp_path, capsys):
    install_fake_client("kubectl")
    assert kuberay(job, "--namespace", "team", "--apply") == 0
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    objects = list(yaml.safe_load_all((tmp_path / "input").read_text()))
    assert {item["metadata"]["namespace"] for item in objects} == {"team"}
    assert capsys.readouterr().out.endswith("made\n")


def test_missing_or_failing_client_is_an_error(job, install_fake_client, capsys, monkeypatch):
    install_fake_client("kubectl", last_command='echo "namespaces \\"team\\" not found" >&2; exit 1')
    assert kuberay(job, "--namespace", "team", "--apply") == 1
    assert 'kubectl apply -f - exited with code 1: namespaces "team" not found' in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert kuberay(job, "--apply") == 2
    assert "kubectl is not installed here, so nothing was applied" in capsys.readouterr().err


def test_cluster_apply_requires_aws_flags_and_output(job, install_fake_client, tmp_path, capsys):
    file = str(tmp_path / "c.yaml")
    install_fake_client("ray")
    assert cli.run(["deploy", "cluster", job, "--output", file, "--apply"]) == 2
    assert "--apply requires --ami, --security-group, --head-profile, --worker-profile" in capsys.readouterr().err
    assert cli.run(["deploy", "cluster", job, *AWS_FLAGS, "--apply"]) == 2
    assert "--apply requires --output" in capsys.readouterr().err
    assert not (tmp_path / "arguments").exists()
    assert cli.run(["deploy", "cluster", job, *AWS_FLAGS, "--output", file, "--apply"]) == 0
    assert (tmp_path / "arguments").read_text() == f"up --yes {file}\n"


@pytest.mark.parametrize(
    ("max_length", "flags"), [(MAX_NAME_LENGTH, []), (MAX_CRON_NAME_LENGTH, ["--schedule", "0 2 * * *"])]
)
def test_too_long_name_is_refused(job, capsys, max_length, flags):
    assert kuberay(job, "--name", "a" * max_length, *flags) == 0
    assert kuberay(job, "--name", "a" * (max_length + 1), *flags) == 2
    assert f"has {max_length + 1} characters; the limit is {max_length}" in capsys.readouterr().err
