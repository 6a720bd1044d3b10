import json

import pytest

from jobs import cli
from peagle.deploy import sagemaker_api
from peagle.deploy.sagemaker_api import RemovedEndpoint

MODEL = "qwen3-coder-30b-a3b-instruct"
FLAGS = ("--instance-type", "ml.g7e.2xlarge", "--image", "i", "--role", "arn:aws:iam::123456789012:role/peagle")


@pytest.fixture
def calls(monkeypatch):
    """Replace the client of SageMaker's API by a class that records its calls."""
    calls = []

    class FakeApi:
        def __init__(self, region, *, say):
            calls.append(region)

        def create(self, requests):
            calls.append(requests)
            return "arn"

        def remove(self, name):
            calls.append(name)
            return RemovedEndpoint(kinds=("endpoint",), lifetime_s=1800.0, usd_per_hour=4.0, remains=("the image i",))

    monkeypatch.setattr(sagemaker_api, "SageMaker", FakeApi)
    return calls


def test_dry_run_prints_the_requests(calls, capsys):
    assert cli.run(["deploy", "sagemaker", MODEL, *FLAGS, "--dry-run"]) == 0
    drafter, price, *data = capsys.readouterr().out.splitlines()
    assert drafter.startswith("drafter: peagle, K=3: SageMaker JumpStart")
    assert price.startswith("$3.36 an hour while it exists (EC2's price of g7e.2xlarge")
    assert json.loads("\n".join(data))["endpoint"]["EndpointName"] == MODEL
    assert calls == []


def test_flags_are_in_the_requests(calls, capsys):
    flags = [*FLAGS, "--region", "us-west-2", "--variable", "HF_HOME=/tmp", "--concurrency", "128"]
    assert cli.run(["deploy", "sagemaker", MODEL, *flags]) == 0
    region, requests = calls
    assert region == "us-west-2"
    variables = requests.model["PrimaryContainer"]["Environment"]
    assert (variables["HF_HOME"], '"num_speculative_tokens": 7' in variables["SM_VLLM_SPECULATIVE_CONFIG"]) == (
        "/tmp",
        True,
    )
    assert f"`peagle deploy sagemaker --down {MODEL}` deletes it and stops the charges" in capsys.readouterr().out


def test_down_reports_what_was_deleted(calls, capsys):
    assert cli.run(["deploy", "sagemaker", "--down", "mine"]) == 0
    assert calls == [None, "mine"]
    assert capsys.readouterr().out.splitlines() == [
        "mine: deleted endpoint; it existed for 30 min 0 s, about $2.00",
        "not deleted: the image i",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name a model to deploy"),
        ((MODEL, "--down", "x"), "name a model to deploy"),
        ((MODEL,), "--instance-type is required"),
        (("gpt-6", *FLAGS), "no model 'gpt-6' in the catalog"),
        ((MODEL, *FLAGS, "--role", "me"), "role: must have the form arn:aws:iam"),
    ],
)
def test_invalid_arguments_are_refused(calls, capsys, arguments, reason):
    assert cli.run(["deploy", "sagemaker", *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert calls == []
