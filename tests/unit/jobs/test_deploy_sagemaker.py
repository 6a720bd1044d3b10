import json

import pytest

from jobs import cli
from peagle.deploy import sagemaker_api
from peagle.deploy.sagemaker_api import Removed

MODEL = "qwen3-coder-30b-a3b-instruct"
FLAGS = ("--instance-type", "ml.g7e.2xlarge", "--image", "i", "--role", "arn:aws:iam::123456789012:role/peagle")


@pytest.fixture
def asked(monkeypatch):
    """SageMaker, which remembers what it was asked."""

    asked = []

    class Api:
        def __init__(self, region, *, say):
            asked.append(region)

        def create(self, requests):
            asked.append(requests)
            return "arn"

        def remove(self, name):
            asked.append(name)
            return Removed(kinds=("endpoint",), lived_s=1800.0, usd_per_hour=4.0, remains=("the image i",))

    monkeypatch.setattr(sagemaker_api, "SageMaker", Api)
    return asked


def test_a_dry_run_prints_the_requests_and_sends_none(asked, capsys):
    assert cli.run(["deploy", "sagemaker", MODEL, *FLAGS, "--dry-run"]) == 0
    drafter, price, *data = capsys.readouterr().out.splitlines()
    assert drafter.startswith("drafter: peagle, K=3: SageMaker JumpStart")
    assert price.startswith("$3.36 an hour while it exists (EC2's price of g7e.2xlarge")
    assert json.loads("\n".join(data))["endpoint"]["EndpointName"] == MODEL
    assert asked == []


def test_it_is_made_in_its_region_and_says_how_it_ends(asked, capsys):
    flags = [*FLAGS, "--region", "us-west-2", "--variable", "HF_HOME=/tmp", "--concurrency", "128"]
    assert cli.run(["deploy", "sagemaker", MODEL, *flags]) == 0
    region, requests = asked
    assert region == "us-west-2"
    variables = requests.model["PrimaryContainer"]["Environment"]
    assert (variables["HF_HOME"], '"num_speculative_tokens": 7' in variables["SM_VLLM_SPECULATIVE_CONFIG"]) == (
        "/tmp",
        True,
    )
    assert f"`peagle deploy sagemaker --down {MODEL}` deletes it and its costs" in capsys.readouterr().out


def test_down_says_what_it_cost_and_what_still_does(asked, capsys):
    assert cli.run(["deploy", "sagemaker", "--down", "mine"]) == 0
    assert asked == [None, "mine"]
    assert capsys.readouterr().out.splitlines() == [
        "mine: deleted endpoint; it was there for 30 min 0 s, about $2.00",
        "still there: the image i",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name a model to deploy"),
        ((MODEL, "--down", "x"), "name a model to deploy"),
        ((MODEL,), "--instance-type is needed"),
        (("gpt-6", *FLAGS), "no model 'gpt-6' in the catalog"),
        ((MODEL, *FLAGS, "--role", "me"), "role: it must be as arn:aws:iam"),
    ],
)
def test_what_is_missing_or_wrong_is_said_before_anything_is_asked(asked, capsys, arguments, reason):
    assert cli.run(["deploy", "sagemaker", *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert asked == []
