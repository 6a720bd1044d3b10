from pathlib import Path
from typing import Any

import pytest

from peagle.catalog.cards import ModelCard, load_catalog
from peagle.deploy.sagemaker import Preset, preset
from peagle.deploy.sagemaker_requests import Requests, SageMakerKeys, make_requests
from peagle.engine.sagemaker import VARIABLE
from peagle.errors import ConfigError, PriceError

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/peagle:0.1.0"
NEEDED = {
    "instance_type": "ml.g7e.2xlarge",
    "image": IMAGE,
    "role": "arn:aws:iam::123456789012:role/peagle",
}


def card() -> ModelCard:
    return load_catalog().get("qwen3-coder-30b-a3b-instruct")


def requested(found: Preset | None = None, **keys: Any) -> Requests:
    has = {f"has_{name}": keys.get(name) is not None for name in ("model_data", "head_data")}
    return make_requests(card(), SageMakerKeys(**NEEDED | keys), found or preset(card(), **has))


def test_three_requests_of_one_name_with_the_drafter_preset() -> None:
    made = requested()
    assert made.name == "qwen3-coder-30b-a3b-instruct"
    container = made.model["PrimaryContainer"]
    assert (container["Image"], made.model["ExecutionRoleArn"]) == (IMAGE, NEEDED["role"])
    variables = container["Environment"]
    assert variables["SM_VLLM_MODEL"] == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert '"num_speculative_tokens": 3' in variables[VARIABLE]
    assert (variables["PEAGLE_SAGEMAKER"], variables["PEAGLE_USD_PER_HOUR"]) == ("true", "3.36312")
    (variant,) = made.endpoint_config["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.g7e.2xlarge", 1)
    assert variant["ModelName"] == made.endpoint["EndpointName"] == made.endpoint["EndpointConfigName"] == made.name
    assert made.price.startswith("EC2's price of g7e.2xlarge")


def test_data_on_s3_is_mounted_where_the_container_looks() -> None:
    made = requested(model_data="s3://b/model", head_data="s3://b/head/")
    container = made.model["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://b/model/"
    (source,) = container["AdditionalModelDataSources"]
    assert (source["ChannelName"], source["S3DataSource"]["S3Uri"]) == ("eagle", "s3://b/head/")
    assert container["Environment"]["SM_VLLM_MODEL"] == "/opt/ml/model"
    assert "/opt/ml/additional-model-data-sources/eagle" in container["Environment"][VARIABLE]


def test_what_is_stated_goes_to_the_container_and_the_instances() -> None:
    made = requested(
        name="mine", instances=2, usd_per_hour=4.5, max_model_len=32768, ami_version="a", variables=["HF_HOME=/tmp/x=y"]
    )
    assert (made.usd_per_hour, made.price, made.name) == (9.0, "as stated", "mine")
    variables = made.model["PrimaryContainer"]["Environment"]
    assert (variables["SM_VLLM_MAX_MODEL_LEN"], variables["HF_HOME"]) == ("32768", "/tmp/x=y")
    assert made.endpoint_config["ProductionVariants"][0]["InferenceAmiVersion"] == "a"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"instance_type": "g7e.2xlarge"}, "it must be as ml.g7e.2xlarge"),
        ({"role": "peagle"}, "it must be as arn:aws:iam::123456789012:role/NAME"),
        ({"model_data": "/models"}, "it must be as s3://BUCKET/FOLDER"),
        ({"name": "a_b"}, "letters, digits and hyphens"),
        ({"name": "a" * 64}, "letters, digits and hyphens"),
        ({"variables": ["HF_TOKEN"]}, "is not KEY=VALUE"),
        ({"variables": ["=x"]}, "is not KEY=VALUE"),
        ({"variables": ["HF_HOME=/a", "HF_HOME=/b"]}, "HF_HOME is given twice"),
    ],
)
def test_what_sagemaker_would_not_take_is_refused_before(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SageMakerKeys(**NEEDED | keys)


def test_a_price_that_nobody_knows_is_asked_for() -> None:
    with pytest.raises(PriceError, match=r"what ml\.x9\.large costs is not known") as error:
        requested(instance_type="ml.x9.large")
    assert "--usd-per-hour" in error.value.hint
    assert requested(instance_type="ml.x9.large", usd_per_hour=1).usd_per_hour == 1


def test_what_is_only_here_is_refused_with_the_command_that_uploads_it(tmp_path: Path) -> None:
    found = Preset(drafter="x", head_folder=tmp_path)
    with pytest.raises(ConfigError, match="on this machine alone") as error:
        requested(found)
    assert "--head-data" in error.value.hint
    assert requested(found, head_data="s3://b/head").name


def test_a_variable_that_is_too_long_is_named() -> None:
    with pytest.raises(ConfigError, match="the variable X has 1025 letters"):
        requested(variables={"X": "x" * 1025})
