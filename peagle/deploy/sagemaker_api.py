"""Create a SageMaker endpoint, wait for it, and delete it.

If the creation fails, everything that was created is deleted, because an endpoint costs money as soon as its instances
start. boto3 is not a dependency of peagle.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from peagle.deploy.sagemaker import CreationRequests
from peagle.economics.report.figures import format_duration
from peagle.errors import CapacityError, ConfigError, EngineError, PeagleError, did_you_mean

POLL_S = 15.0
_REPORT_EVERY_S = 60.0
_DELETION_TIMEOUT_S = 1800.0
# By AWS error code: peagle's exception, and a hint.
_AWS_ERRORS: dict[str, tuple[type[PeagleError], str]] = {
    "ExpiredTokenException": (
        ConfigError,
        "the credentials have expired: run aws sso login, or create new credentials",
    ),
    "ExpiredToken": (ConfigError, "the credentials have expired: run aws sso login, or create new credentials"),
    "UnrecognizedClientException": (ConfigError, "the credentials are invalid: run aws configure"),
    "InvalidClientTokenId": (ConfigError, "the credentials are invalid: run aws configure"),
    "AccessDeniedException": (ConfigError, "docs/deploy.md lists the permissions that your user and the role need"),
    "ResourceLimitExceeded": (
        CapacityError,
        "your account's quota for this instance type is too small: Service Quotas, SageMaker, 'for endpoint usage'",
    ),
    "ValidationException": (ConfigError, ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedEndpoint:
    """A deleted endpoint.

    Attributes:
        kinds: what was deleted: "endpoint", "endpoint configuration", "model".
        lifetime_s: seconds since the endpoint was created; None if there was no endpoint.
        usd_per_hour: price of all instances, as recorded at creation; None if unknown.
        remains: resources that were not deleted and still cost money.
    """

    kinds: tuple[str, ...]
    lifetime_s: float | None
    usd_per_hour: float | None
    remains: tuple[str, ...]


class SageMaker:
    """SageMaker's API in one region. `say` receives progress."""

    def __init__(
        self,
        region: str | None,
        *,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        try:
            import boto3
        except ImportError:
            raise ConfigError("boto3 is not installed, but SageMaker needs it", hint="run pip install boto3") from None
        with _explain_errors("no connection to SageMaker"):
            self._api: Any = boto3.client("sagemaker", region_name=region)
        self._say, self._sleep, self._now = say, sleep, now

    def create(self, requests: CreationRequests) -> str:
        """Create the endpoint, and return its ARN when it is in service. If that fails, everything is deleted."""
        name = requests.name
        self._require_instance_type(requests.endpoint_config["ProductionVariants"][0]["InstanceType"])
        self._require_unused(name)
        created: list[str] = []
        try:
            for kind in _KINDS:
                self._create(kind, requests, created)
            return self._wait_until_in_service(name)
        except BaseException as error:  # also Ctrl-C
            self._roll_back(name, created, error)
            raise

    def remove(self, name: str) -> RemovedEndpoint:
        """Delete the endpoint, its configuration and its model. Raises ConfigError if none of them exists."""
        endpoint = self._describe("endpoint", name)
        model = self._describe("model", name)
        config = self._describe("endpoint configuration", name)
        existing = {"endpoint": endpoint, "endpoint configuration": config, "model": model}
        kinds = tuple(kind for kind, description in existing.items() if description is not None)
        if not kinds:
            raise ConfigError(f"SageMaker has nothing called {name}", hint=self._hint_existing_endpoints())
        for kind in kinds:
            self._delete(kind, name)
        created_at = endpoint and endpoint.get("CreationTime")
        return RemovedEndpoint(
            kinds=kinds,
            lifetime_s=self._now() - created_at.timestamp() if created_at else None,
            usd_per_hour=_usd_per_hour(model, config),
            remains=tuple(_remaining_resources(name, model)),
        )

    def _create(self, kind: str, requests: CreationRequests, created: list[str]) -> None:
        bodies = dict(zip(_KINDS, (requests.model, requests.endpoint_config, requests.endpoint), strict=True))
        try:
            with _explain_errors(f"{kind} {requests.name}"):
                getattr(self._api, _CREATE[kind])(**bodies[kind])
        except Exception:  # AWS has not created the resource
            raise
        except BaseException:  # Ctrl-C: AWS might have created it
            created.append(kind)
            raise
        created.append(kind)
        self._say(f"{kind} {requests.name}: created")

    def _wait_until_in_service(self, name: str) -> str:
        started_at = reported_at = self._now()
        while True:
            with _explain_errors(f"endpoint {name}"):
                endpoint = self._api.describe_endpoint(EndpointName=name)
            status = endpoint["EndpointStatus"]
            if status == "InService":
                return str(endpoint["EndpointArn"])
            if status not in ("Creating", "Updating", "SystemUpdating"):
                reason = endpoint.get("FailureReason") or f"its status is {status}"
                raise EngineError(
                    f"the endpoint {name} failed to start: {reason}",
                    hint=f"see its log {_log_group(name)} (CloudWatch)",
                )
            if self._now() - reported_at >= _REPORT_EVERY_S:
                reported_at = self._now()
                self._say(f"endpoint {name}: {status} for {format_duration(reported_at - started_at)}")
            self._sleep(POLL_S)

    def _roll_back(self, name: str, created: list[str], error: BaseException) -> None:
        if not created:
            return
        self._say(f"deleting: {', '.join(created)}")
        remaining = list(created)
        try:
            for kind in reversed(created):
                self._delete(kind, name)
                remaining.remove(kind)
        except BaseException as deletion_error:
            raise EngineError(
                f"{error}; {name} still has its {' and '.join(remaining)}, which may cost money: {deletion_error}",
                hint=f"peagle deploy sagemaker --down {name}",
            ) from error

    def _delete(self, kind: str, name: str) -> None:
        """Delete a resource. An endpoint can only be deleted after its creation has finished."""
        give_up_at = self._now() + _DELETION_TIMEOUT_S
        while True:
            try:
                with _explain_errors(f"{kind} {name}"):
                    getattr(self._api, _CREATE[kind].replace("create", "delete"))(**{_NAME_ARGUMENTS[kind]: name})
                return
            except ConfigError as error:
                if _is_missing(error):
                    return
                if "in-progress" not in error.message or self._now() >= give_up_at:
                    raise
            self._say(f"{kind} {name}: cannot be deleted until it has been created; waiting")
            self._sleep(POLL_S)

    def _describe(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            with _explain_errors(f"{kind} {name}"):
                describe = getattr(self._api, _CREATE[kind].replace("create", "describe"))
                return cast("dict[str, Any]", describe(**{_NAME_ARGUMENTS[kind]: name}))
        except ConfigError as error:
            if _is_missing(error):
                return None
            raise

    def _require_unused(self, name: str) -> None:
        for kind in _KINDS:
            if self._describe(kind, name) is not None:
                raise ConfigError(
                    f"SageMaker already has the {kind} {name}",
                    hint=f"choose another --name, or delete it: peagle deploy sagemaker --down {name}",
                )

    def _require_instance_type(self, instance_type: str) -> None:
        instance_types = self._api.meta.service_model.shape_for("ProductionVariantInstanceType").enum
        if instance_type not in instance_types:
            raise ConfigError(
                f"SageMaker has no instance type {instance_type}", hint=did_you_mean(instance_type, instance_types)
            )

    def _hint_existing_endpoints(self) -> str:
        with _explain_errors("the list of endpoints"):
            names = [endpoint["EndpointName"] for endpoint in self._api.list_endpoints()["Endpoints"]]
        return f"existing endpoints: {', '.join(names)}" if names else "there is no endpoint in this region"


_CREATE = {"model": "create_model", "endpoint configuration": "create_endpoint_config", "endpoint": "create_endpoint"}
_KINDS = tuple(_CREATE)
_NAME_ARGUMENTS = {"model": "ModelName", "endpoint configuration": "EndpointConfigName", "endpoint": "EndpointName"}


@contextmanager
def _explain_errors(subject: str) -> Iterator[None]:
    """Convert AWS's errors to peagle's, with `subject` and a hint."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    try:
        yield
    except NoCredentialsError:
        raise ConfigError(f"{subject}: no AWS credentials found", hint="run aws configure or set AWS_PROFILE") from None
    except NoRegionError:
        raise ConfigError(f"{subject}: no AWS region is set", hint="set --region or AWS_REGION") from None
    except ClientError as error:
        details = error.response["Error"]
        error_type, hint = _AWS_ERRORS.get(details["Code"], (PeagleError, ""))
        raise error_type(f"{subject}: {details['Message']} ({details['Code']})", hint=hint) from error
    except BotoCoreError as error:
        raise PeagleError(f"{subject}: {error}", hint="check that SageMaker is available in the region") from error


def _is_missing(error: ConfigError) -> bool:
    return any(phrase in error.message.lower() for phrase in ("could not find", "does not exist", "cannot find"))


def _log_group(name: str) -> str:
    return f"/aws/sagemaker/Endpoints/{name}"


def _usd_per_hour(model: dict[str, Any] | None, config: dict[str, Any] | None) -> float | None:
    """Return the hourly price of all instances, which `make_requests` wrote into the container's variables."""
    variables = (model or {}).get("PrimaryContainer", {}).get("Environment", {})
    variants = (config or {}).get("ProductionVariants", [])
    if "PEAGLE_USD_PER_HOUR" not in variables or not variants:
        return None
    num_instances: int = sum(variant.get("InitialInstanceCount", 0) for variant in variants)
    return float(variables["PEAGLE_USD_PER_HOUR"]) * num_instances


def _remaining_resources(name: str, model: dict[str, Any] | None) -> Iterator[str]:
    container = (model or {}).get("PrimaryContainer", {})
    if image := container.get("Image"):
        yield f"the image {image}, billed per GB-month"
    sources = [container["ModelDataSource"]] if "ModelDataSource" in container else []
    for source in [*sources, *container.get("AdditionalModelDataSources", [])]:
        yield f"the data in {source['S3DataSource']['S3Uri']}, billed per GB-month"
    yield f"the log {_log_group(name)} in CloudWatch, billed per GB-month"
