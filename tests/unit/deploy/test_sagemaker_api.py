from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from peagle.catalog.cards import load_catalog
from peagle.deploy.sagemaker import CreationRequests, SageMakerOptions, make_requests, preset
from peagle.deploy.sagemaker_api import SageMaker
from peagle.errors import CapacityError, ConfigError, EngineError, PeagleError

NAME = "qwen3-coder-30b-a3b-instruct"
RESOURCE_KINDS = ("model", "endpoint configuration", "endpoint")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of SageMaker in a fake AWS account without resources."""
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # moto 5.2.5 does not know the instance type ml.g7e.2xlarge yet; boto3 does.
    monkeypatch.setattr("moto.sagemaker.models.FakeEndpointConfig.validate_instance_type", lambda *_: None)
    with mock_aws():
        yield boto3.client("sagemaker")


class Clock:
    """A clock that `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_qwen_requests() -> CreationRequests:
    card = load_catalog().get(NAME)
    options = SageMakerOptions(
        instance_type="ml.g7e.2xlarge", image="i", role="arn:aws:iam::123456789012:role/peagle", usd_per_hour=2
    )
    return make_requests(card, options, preset(card))


def make_sagemaker(messages: list[str] | None = None, clock: Clock | None = None) -> SageMaker:
    clock = clock or Clock()
    return SageMaker(
        None, say=(messages if messages is not None else []).append, sleep=clock.sleep, now=lambda: clock.now
    )


def existing_kinds(aws: Any) -> list[str]:
    """Return the kinds of the resources that exist."""
    resources = {
        "model": aws.list_models()["Models"],
        "endpoint configuration": aws.list_endpoint_configs()["EndpointConfigs"],
        "endpoint": aws.list_endpoints()["Endpoints"],
    }
    return [kind for kind in RESOURCE_KINDS if resources[kind]]


def patch_client(monkeypatch: pytest.MonkeyPatch, api: SageMaker, **methods: Any) -> None:
    """Replace methods of the boto3 client of `api`."""
    for name, method in methods.items():
        monkeypatch.setattr(api._api, name, method)


def client_error(code: str, message: str = "no") -> Any:
    """Return a function that raises this AWS error."""

    def raise_error(**_: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": message}}, "X")

    return raise_error


def test_create_and_remove_endpoint(aws: Any) -> None:
    messages: list[str] = []
    api = make_sagemaker(messages)
    assert api.create(make_qwen_requests()).endswith(f"endpoint/{NAME}")
    assert existing_kinds(aws) == list(RESOURCE_KINDS)
    variables = aws.describe_model(ModelName=NAME)["PrimaryContainer"]["Environment"]
    assert "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE" in variables["SM_VLLM_SPECULATIVE_CONFIG"]
    assert messages == [f"{kind} {NAME}: created" for kind in RESOURCE_KINDS]
    removed = api.remove(NAME)
    assert existing_kinds(aws) == []
    assert set(removed.kinds) == set(RESOURCE_KINDS)
    assert (removed.usd_per_hour, removed.lifetime_s is not None) == (2.0, True)
    assert removed.remains == (
        "the image i, billed per GB-month",
        f"the log /aws/sagemaker/Endpoints/{NAME} in CloudWatch, billed per GB-month",
    )


def test_create_waits_until_the_endpoint_is_in_service(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    clock = Clock()
    api = make_sagemaker(messages, clock)
    describe_endpoint = api._api.describe_endpoint

    def describe_slow_endpoint(**name: Any) -> Any:
        description = describe_endpoint(**name)
        return description | {"EndpointStatus": "Creating" if clock.now < 150 else "InService"}

    patch_client(monkeypatch, api, describe_endpoint=describe_slow_endpoint)
    api.create(make_qwen_requests())
    assert messages[3:] == [f"endpoint {NAME}: Creating for 1 min 0 s", f"endpoint {NAME}: Creating for 2 min 0 s"]


@pytest.mark.parametrize("method", ["create_model", "create_endpoint_config", "create_endpoint"])
def test_refused_creation_is_rolled_back(aws: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    api = make_sagemaker()
    patch_client(monkeypatch, api, **{method: client_error("ResourceLimitExceeded", "the limit is 0 Instances")})
    with pytest.raises(CapacityError, match="the limit is 0 Instances") as error:
        api.create(make_qwen_requests())
    assert "Service Quotas" in error.value.hint
    assert existing_kinds(aws) == []


def test_failed_start_is_rolled_back(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    api = make_sagemaker(messages)
    failed = {"EndpointStatus": "Failed", "FailureReason": "The container did not pass the ping health check."}
    describe = api._api.describe_endpoint
    patch_client(monkeypatch, api, describe_endpoint=lambda **name: describe(**name) | failed)
    with pytest.raises(EngineError, match="did not pass the ping health check"):
        api.create(make_qwen_requests())
    assert existing_kinds(aws) == []
    assert messages[-1] == "deleting: model, endpoint configuration, endpoint"


def test_interrupted_creation_is_rolled_back(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = make_sagemaker()
    create_endpoint = api._api.create_endpoint

    def create_and_interrupt(**request: Any) -> None:
        create_endpoint(**request)
        raise KeyboardInterrupt

    patch_client(monkeypatch, api, create_endpoint=create_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        api.create(make_qwen_requests())
    assert existing_kinds(aws) == []


def test_remove_waits_until_the_endpoint_has_been_created(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    clock = Clock()
    api = make_sagemaker(messages, clock)
    api.create(make_qwen_requests())
    delete_endpoint = api._api.delete_endpoint

    def delete_after_40_s(**name: Any) -> None:
        if clock.now < 40:
            client_error("ValidationException", "Cannot update in-progress endpoint")()  # raises
        delete_endpoint(**name)

    patch_client(monkeypatch, api, delete_endpoint=delete_after_40_s)
    api.remove(NAME)
    assert existing_kinds(aws) == []
    assert messages[-1] == f"endpoint {NAME}: cannot be deleted until it has been created; waiting"
    assert clock.now == 45  # the first multiple of POLL_S after 40 s


def test_failed_rollback_hints_at_the_command_that_removes_the_endpoint(
    aws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_sagemaker()
    patch_client(
        monkeypatch,
        api,
        create_endpoint=client_error("ValidationException", "no such type here"),
        delete_model=client_error("AccessDeniedException", "not you"),
    )
    with pytest.raises(EngineError, match="still has its model, which may cost money") as error:
        api.create(make_qwen_requests())
    assert error.value.hint == f"peagle deploy sagemaker --down {NAME}"
    assert existing_kinds(aws) == ["model"]


def test_existing_name_is_refused_and_unchanged(aws: Any) -> None:
    api = make_sagemaker()
    api.create(make_qwen_requests())
    with pytest.raises(ConfigError, match=r"already has the model") as error:
        api.create(make_qwen_requests())
    assert "--down" in error.value.hint
    assert existing_kinds(aws) == list(RESOURCE_KINDS)


def test_remove_deletes_partial_endpoints_and_refuses_unknown_names(aws: Any) -> None:
    api = make_sagemaker()
    with pytest.raises(ConfigError, match="nothing called x") as error:
        api.remove("x")
    assert error.value.hint == "there is no endpoint in this region"
    api.create(make_qwen_requests())
    aws.delete_endpoint(EndpointName=NAME)
    removed = api.remove(NAME)
    assert (set(removed.kinds), removed.lifetime_s) == ({"model", "endpoint configuration"}, None)
    assert existing_kinds(aws) == []


def test_unknown_instance_type_gets_a_suggestion(aws: Any) -> None:
    misspelled = make_qwen_requests()
    misspelled.endpoint_config["ProductionVariants"][0]["InstanceType"] = "ml.g7e.2xlrge"
    with pytest.raises(ConfigError, match=r"no instance type ml\.g7e\.2xlrge") as error:
        make_sagemaker().create(misspelled)
    assert "ml.g7e.2xlarge" in error.value.hint


@pytest.mark.parametrize(
    ("code", "error_type", "hint"),
    [
        ("ExpiredTokenException", ConfigError, "expired"),
        ("UnrecognizedClientException", ConfigError, "aws configure"),
        ("AccessDeniedException", ConfigError, "docs/deploy.md"),
        ("InternalFailure", PeagleError, ""),
    ],
)
def test_aws_errors_are_converted_with_a_hint(
    aws: Any, monkeypatch: pytest.MonkeyPatch, code: str, error_type: type[PeagleError], hint: str
) -> None:
    api = make_sagemaker()
    patch_client(monkeypatch, api, describe_model=client_error(code, "the reason"))
    with pytest.raises(error_type, match=rf"the reason \({code}\)") as error:
        api.create(make_qwen_requests())
    assert hint in error.value.hint
    assert existing_kinds(aws) == []


def test_missing_region_or_credentials_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="no AWS region is set"):
        make_sagemaker()
    api = SageMaker("us-east-1", say=print)
    with pytest.raises(ConfigError, match="no AWS credentials found"):
        api.create(make_qwen_requests())
