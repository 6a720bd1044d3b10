"""Make an endpoint of SageMaker's, wait for it, take it away.

What fails half-way is taken back, since an endpoint costs money from its instances' first minute. It sends requests by
boto3, which is not among peagle's own packages.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peagle.deploy.sagemaker import Requests
from peagle.economics.report.figures import format_duration
from peagle.errors import CapacityError, ConfigError, EngineError, PeagleError, did_you_mean

POLL_S = 15.0
_SAID_EVERY_S = 60.0
_DELETION_S = 1800.0
_MISSING = ("could not find", "does not exist", "cannot find")
_BUSY = "in-progress"
# By AWS's code: what it means here, and what to do.
_EXPLAINED: dict[str, tuple[type[PeagleError], str]] = {
    "ExpiredTokenException": (ConfigError, "the credentials have expired: aws sso login, or new ones"),
    "ExpiredToken": (ConfigError, "the credentials have expired: aws sso login, or new ones"),
    "UnrecognizedClientException": (ConfigError, "the credentials are not AWS's: aws configure"),
    "InvalidClientTokenId": (ConfigError, "the credentials are not AWS's: aws configure"),
    "AccessDeniedException": (ConfigError, "docs/deploy.md has the rights that your user and the role need"),
    "ResourceLimitExceeded": (
        CapacityError,
        "your account's quota for this instance type is too small: Service Quotas, SageMaker, 'for endpoint usage'",
    ),
    "ValidationException": (ConfigError, ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """An endpoint that was taken away.

    Attributes:
        kinds: what there was of it: "endpoint", "endpoint configuration", "model".
        lived_s: from its making until now; None where there was no endpoint.
        usd_per_hour: of its instances together, as they were told when it was made; None where nobody did.
        remains: what is still there and may cost money, in words.
    """

    kinds: tuple[str, ...]
    lived_s: float | None
    usd_per_hour: float | None
    remains: tuple[str, ...]


class SageMaker:
    """The API in one region.

    Args:
        say: told how far it is.
    """

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
            raise ConfigError("SageMaker is reached by boto3, which is not here", hint="pip install boto3") from None
        with _explained("no connection to SageMaker"):
            self._api: Any = boto3.client("sagemaker", region_name=region)
        self._say, self._sleep, self._now = say, sleep, now

    def create(self, requests: Requests) -> str:
        """Make the endpoint, and return its ARN when it is in service.

        Raises:
            ConfigError: a name is taken, the instance type is none, or AWS refuses a request or the credentials.
            CapacityError: a quota.
            EngineError: the endpoint did not come up. In each case nothing of it is left.
        """
        name = requests.name
        self._require_instance_type(requests.endpoint_config["ProductionVariants"][0]["InstanceType"])
        self._require_free(name)
        made: list[str] = []
        try:
            for kind in _KINDS:
                self._make(kind, requests, made)
            return self._wait_until_in_service(name)
        except BaseException as error:  # Ctrl-C too
            self._take_back(name, made, error)
            raise

    def remove(self, name: str) -> Removed:
        """Delete the endpoint, its configuration and its model.

        Raises:
            ConfigError: there is nothing of that name.
        """
        endpoint = self._describe("endpoint", name)
        model = self._describe("model", name)
        config = self._describe("endpoint configuration", name)
        there = {"endpoint": endpoint, "endpoint configuration": config, "model": model}
        kinds = tuple(kind for kind, found in there.items() if found is not None)
        if not kinds:
            raise ConfigError(f"SageMaker has nothing called {name}", hint=self._names())
        for kind in kinds:
            self._delete(kind, name)
        created = endpoint and endpoint.get("CreationTime")
        return Removed(
            kinds=kinds,
            lived_s=self._now() - created.timestamp() if created else None,
            usd_per_hour=_usd_per_hour(model, config),
            remains=tuple(_remains(name, model)),
        )

    def _make(self, kind: str, requests: Requests, made: list[str]) -> None:
        try:
            with _explained(f"{kind} {requests.name}"):
                getattr(self._api, _CREATE[kind])(**_request(requests, kind))
        except Exception:
            raise
        except BaseException:  # Ctrl-C: it may be made all the same
            made.append(kind)
            raise
        made.append(kind)
        self._say(f"{kind} {requests.name}: made")

    def _wait_until_in_service(self, name: str) -> str:
        began_at = said_at = self._now()
        while True:
            with _explained(f"endpoint {name}"):
                found = self._api.describe_endpoint(EndpointName=name)
            status = found["EndpointStatus"]
            if status == "InService":
                return str(found["EndpointArn"])
            if status not in ("Creating", "Updating", "SystemUpdating"):
                reason = found.get("FailureReason") or f"its status is {status}"
                raise EngineError(
                    f"the endpoint {name} did not come up: {reason}",
                    hint=f"its log was {_log_group(name)} (CloudWatch)",
                )
            if self._now() - said_at >= _SAID_EVERY_S:
                said_at = self._now()
                self._say(f"endpoint {name}: {status} since {format_duration(said_at - began_at)}")
            self._sleep(POLL_S)

    def _take_back(self, name: str, made: list[str], error: BaseException) -> None:
        if not made:
            return
        self._say(f"taking back: {', '.join(made)}")
        left = list(made)
        try:
            for kind in reversed(made):
                self._delete(kind, name)
                left.remove(kind)
        except BaseException as another:
            raise EngineError(
                f"{error}; and of {name} there is still its {', '.join(left)}, which may cost money: {another}",
                hint=f"peagle deploy sagemaker --down {name}",
            ) from error

    def _delete(self, kind: str, name: str) -> None:
        """Delete one of the three; an endpoint that is being made only then."""
        until = self._now() + _DELETION_S
        while True:
            try:
                with _explained(f"{kind} {name}"):
                    getattr(self._api, _DELETE[kind])(**{_NAMES[kind]: name})
                return
            except ConfigError as error:
                if _is_missing(error):
                    return
                if _BUSY not in error.message or self._now() >= until:
                    raise
            self._say(f"{kind} {name}: SageMaker does not delete it before it is made; waiting")
            self._sleep(POLL_S)

    def _describe(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            with _explained(f"{kind} {name}"):
                found: dict[str, Any] = getattr(self._api, _DESCRIBE[kind])(**{_NAMES[kind]: name})
                return found
        except ConfigError as error:
            if _is_missing(error):
                return None
            raise

    def _require_free(self, name: str) -> None:
        for kind in _KINDS:
            if self._describe(kind, name) is not None:
                raise ConfigError(
                    f"SageMaker has the {kind} {name} already",
                    hint=f"choose another --name, or take it away: peagle deploy sagemaker --down {name}",
                )

    def _require_instance_type(self, instance_type: str) -> None:
        known = self._api.meta.service_model.shape_for("ProductionVariantInstanceType").enum
        if instance_type not in known:
            raise ConfigError(
                f"SageMaker has no instance type {instance_type}", hint=did_you_mean(instance_type, known)
            )

    def _names(self) -> str:
        with _explained("the list of endpoints"):
            names = [one["EndpointName"] for one in self._api.list_endpoints()["Endpoints"]]
        return f"endpoints there: {', '.join(names)}" if names else "there is no endpoint in this region"


_KINDS = ("model", "endpoint configuration", "endpoint")
_CREATE = {"model": "create_model", "endpoint configuration": "create_endpoint_config", "endpoint": "create_endpoint"}
_DESCRIBE = {kind: name.replace("create", "describe") for kind, name in _CREATE.items()}
_DELETE = {kind: name.replace("create", "delete") for kind, name in _CREATE.items()}
_NAMES = {"model": "ModelName", "endpoint configuration": "EndpointConfigName", "endpoint": "EndpointName"}


def _request(requests: Requests, kind: str) -> dict[str, Any]:
    return {"model": requests.model, "endpoint configuration": requests.endpoint_config, "endpoint": requests.endpoint}[
        kind
    ]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn AWS's errors into ours: one line, and what to do.

    Raises:
        ConfigError: credentials, region, rights, or a request that is refused.
        CapacityError: a quota.
        PeagleError: anything else that AWS says.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    try:
        yield
    except NoCredentialsError:
        raise ConfigError(f"{what}: no AWS credentials were found", hint="aws configure, or AWS_PROFILE") from None
    except NoRegionError:
        raise ConfigError(f"{what}: no region is named", hint="--region, or AWS_REGION") from None
    except ClientError as error:
        told = error.response["Error"]
        kind, hint = _EXPLAINED.get(told["Code"], (PeagleError, ""))
        raise kind(f"{what}: {told['Message']} ({told['Code']})", hint=hint) from error
    except BotoCoreError as error:
        raise PeagleError(f"{what}: {error}", hint="does SageMaker exist in that region?") from error


def _is_missing(error: ConfigError) -> bool:
    return any(words in error.message.lower() for words in _MISSING)


def _log_group(name: str) -> str:
    return f"/aws/sagemaker/Endpoints/{name}"


def _usd_per_hour(model: dict[str, Any] | None, config: dict[str, Any] | None) -> float | None:
    """The price that the container was told, for all instances."""
    variables = (model or {}).get("PrimaryContainer", {}).get("Environment", {})
    variants = (config or {}).get("ProductionVariants", [])
    if "PEAGLE_USD_PER_HOUR" not in variables or not variants:
        return None
    num_instances: int = sum(one.get("InitialInstanceCount", 0) for one in variants)
    return float(variables["PEAGLE_USD_PER_HOUR"]) * num_instances


def _remains(name: str, model: dict[str, Any] | None) -> Iterator[str]:
    container = (model or {}).get("PrimaryContainer", {})
    if image := container.get("Image"):
        yield f"the image {image}, by the GB and month"
    sources = [container["ModelDataSource"]] if "ModelDataSource" in container else []
    for source in [*sources, *container.get("AdditionalModelDataSources", [])]:
        yield f"the data in {source['S3DataSource']['S3Uri']}, by the GB and month"
    yield f"the log {_log_group(name)} in CloudWatch, by the GB and month"
