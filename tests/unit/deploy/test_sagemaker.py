import json
from pathlib import Path
from typing import Any

import pytest

from peagle.catalog.cards import ModelCard, load_catalog
from peagle.deploy.sagemaker import CreationRequests, Preset, SageMakerOptions, make_requests, preset
from peagle.engine.sagemaker import SPECULATIVE_CONFIG_VARIABLE, serve_options
from peagle.errors import CapacityError, ConfigError, PriceError

PUBLISHED_DRAFTER = {"num_speculative_tokens": 3, "method": "eagle3", "parallel_drafting": True}
MODEL = "qwen3-coder-30b-a3b-instruct"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/peagle:0.1.0"
REQUIRED = {"instance_type": "ml.g7e.2xlarge", "image": IMAGE, "role": "arn:aws:iam::123456789012:role/peagle"}


def card_of(name: str) -> ModelCard:
    return load_catalog().get(name)


def speculative_config(resolved: Preset) -> dict[str, object]:
    config: dict[str, object] = json.loads(resolved.variables[SPECULATIVE_CONFIG_VARIABLE])
    return config


def test_preset_is_the_published_deployment() -> None:
    resolved = preset(card_of("qwen3-coder-30b-a3b-instruct"))
    assert speculative_config(resolved) == PUBLISHED_DRAFTER | {"model": "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE"}
    assert resolved.variables["SM_VLLM_MODEL"] == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert "K=3: SageMaker JumpStart (its walk-through), ml.g7e.2xlarge [AWS machine learning blog" in resolved.drafter
    assert resolved.uploads == []


def test_preset_for_a_concurrency_uses_the_recommended_k() -> None:
    card = card_of("qwen3-coder-30b-a3b-instruct")
    assert speculative_config(preset(card, concurrency=128))["num_speculative_tokens"] == 7
    assert "up to 128 concurrent requests" in preset(card, concurrency=128).drafter
    assert SPECULATIVE_CONFIG_VARIABLE not in preset(card, concurrency=129).variables


def test_preset_prefers_deployment_on_same_instance_type() -> None:
    card = card_of("qwen3-coder-30b-a3b-instruct")
    (published,) = card.heads["peagle"].deployments
    other = published.model_copy(update={"instance_type": "ml.p6-b200.48xlarge", "num_speculative_tokens": 11})
    head = card.heads["peagle"].model_copy(update={"deployments": [published, other]})
    card = card.model_copy(update={"heads": {"peagle": head}})
    assert speculative_config(preset(card))["num_speculative_tokens"] == 3
    assert speculative_config(preset(card, instance_type="ml.p6-b200.48xlarge"))["num_speculative_tokens"] == 11


def test_preset_without_head_explains_why() -> None:
    resolved = preset(card_of("gemma-4-31b-it"))
    assert list(resolved.variables) == ["SM_VLLM_MODEL"]
    assert resolved.drafter == "none, because nothing was measured or published"


def test_preset_lists_local_folders_to_upload(tmp_path: Path) -> None:
    card = card_of("qwen3-coder-30b-a3b-instruct")
    source = card.source.model_copy(update={"kind": "folder", "id": str(tmp_path / "mine")})
    head = card.heads["peagle"].model_copy(update={"kind": "folder", "id": str(tmp_path / "head")})
    resolved = preset(card.model_copy(update={"source": source, "heads": {"peagle": head}}))
    assert resolved.variables["SM_VLLM_MODEL"] == "/opt/ml/model"
    assert speculative_config(resolved) == PUBLISHED_DRAFTER | {"model": "/opt/ml/additional-model-data-sources/eagle"}
    assert resolved.uploads == [
        (tmp_path / "mine", Path("/opt/ml/model")),
        (tmp_path / "head", Path("/opt/ml/additional-model-data-sources/eagle")),
    ]


def test_embedded_model_comes_from_hub_and_its_head_is_uploaded(shipped_head: Path) -> None:
    resolved = preset(card_of("smollm2-135m"))
    assert resolved.variables["SM_VLLM_MODEL"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    ((folder, _),) = resolved.uploads
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("name", load_catalog().names())
def test_peagle_image_accepts_every_preset(name: str) -> None:
    resolved = preset(card_of(name))
    options, drafter = (
        serve_options(resolved.variables),
        speculative_config(resolved) if SPECULATIVE_CONFIG_VARIABLE in resolved.variables else {},
    )
    assert options["model"] == resolved.variables["SM_VLLM_MODEL"]
    assert options.get("num_speculative_tokens") == drafter.get("num_speculative_tokens")


def make_test_requests(resolved: Preset | None = None, **options: Any) -> CreationRequests:
    has = {f"has_{name}": options.get(name) is not None for name in ("model_data", "head_data")}
    return make_requests(
        card_of(MODEL), SageMakerOptions(**REQUIRED | options), resolved or preset(card_of(MODEL), **has)
    )


def test_requests_share_one_name_and_have_the_drafter_preset() -> None:
    requests = make_test_requests()
    assert requests.name == "qwen3-coder-30b-a3b-instruct"
    container = requests.model["PrimaryContainer"]
    assert (container["Image"], requests.model["ExecutionRoleArn"]) == (IMAGE, REQUIRED["role"])
    variables = container["Environment"]
    assert variables["SM_VLLM_MODEL"] == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert '"num_speculative_tokens": 3' in variables[SPECULATIVE_CONFIG_VARIABLE]
    assert (variables["PEAGLE_SAGEMAKER"], variables["PEAGLE_USD_PER_HOUR"]) == ("true", "3.36312")
    (variant,) = requests.endpoint_config["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.g7e.2xlarge", 1)
    names = {variant["ModelName"], requests.endpoint["EndpointName"], requests.endpoint["EndpointConfigName"]}
    assert names == {requests.name}
    assert requests.price.startswith("EC2's price of g7e.2xlarge")


def test_model_and_head_on_s3_are_mounted_in_the_container() -> None:
    requests = make_test_requests(model_data="s3://b/model", head_data="s3://b/head/")
    container = requests.model["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://b/model/"
    (source,) = container["AdditionalModelDataSources"]
    assert (source["ChannelName"], source["S3DataSource"]["S3Uri"]) == ("eagle", "s3://b/head/")
    assert container["Environment"]["SM_VLLM_MODEL"] == "/opt/ml/model"
    assert "/opt/ml/additional-model-data-sources/eagle" in container["Environment"][SPECULATIVE_CONFIG_VARIABLE]


def test_options_are_set_in_the_requests() -> None:
    requests = make_test_requests(
        name="mine", instances=2, usd_per_hour=4.5, max_model_len=32768, ami_version="a", variables=["HF_HOME=/tmp/x=y"]
    )
    assert (requests.usd_per_hour, requests.price, requests.name) == (9.0, "as stated", "mine")
    variables = requests.model["PrimaryContainer"]["Environment"]
    assert (variables["SM_VLLM_MAX_MODEL_LEN"], variables["HF_HOME"]) == ("32768", "/tmp/x=y")
    assert requests.endpoint_config["ProductionVariants"][0]["InferenceAmiVersion"] == "a"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"instance_type": "g7e.2xlarge"}, "must have the form ml.g7e.2xlarge"),
        ({"role": "peagle"}, "must have the form arn:aws:iam::123456789012:role/NAME"),
        ({"model_data": "/models"}, "must have the form s3://BUCKET/FOLDER"),
        ({"name": "a_b"}, "letters, digits, hyphens"),
        ({"name": "a" * 64}, "letters, digits, hyphens"),
        ({"variables": ["HF_TOKEN"]}, "is not KEY=VALUE"),
        ({"variables": ["=x"]}, "is not KEY=VALUE"),
        ({"variables": ["HF_HOME=/a", "HF_HOME=/b"]}, "HF_HOME is given twice"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SageMakerOptions(**REQUIRED | options)


def test_instance_type_without_a_known_price_needs_usd_per_hour() -> None:
    with pytest.raises(PriceError, match=r"the price of ml\.x9\.large is unknown") as error:
        make_test_requests(instance_type="ml.x9.large")
    assert "--usd-per-hour" in error.value.hint
    assert make_test_requests(instance_type="ml.x9.large", usd_per_hour=1).usd_per_hour == 1


def test_local_head_is_refused_with_a_hint(tmp_path: Path) -> None:
    resolved = Preset(drafter="x", head_folder=tmp_path)
    with pytest.raises(ConfigError, match="only on this machine") as error:
        make_test_requests(resolved)
    assert "--head-data" in error.value.hint
    assert make_test_requests(resolved, head_data="s3://b/head").name


def test_too_long_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="the variable X has 1025 characters"):
        make_test_requests(variables={"X": "x" * 1025})


def test_too_small_instances_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"g6\.xlarge: .*1 x L4") as error:
        make_test_requests(instance_type="ml.g6.xlarge", usd_per_hour=1)
    assert "larger instance type" in error.value.hint
    variables = {"SM_VLLM_TENSOR_PARALLEL_SIZE": "4"}
    assert make_test_requests(instance_type="ml.g6.12xlarge", usd_per_hour=1, variables=variables).usd_per_hour == 1
