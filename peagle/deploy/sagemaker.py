"""A catalog model as a SageMaker endpoint: the container's settings, and the requests that create it.

The variables work for AWS's own vLLM container and for peagle's (`peagle.engine.sagemaker`). `sagemaker_api.py` sends
the requests.
"""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from peagle.catalog.cards import ModelCard
from peagle.catalog.embedded import EMBEDDED_TARGETS, embedded_name
from peagle.catalog.shipped_heads import HEADS_FOLDER, complete_head
from peagle.deploy.workload import require_room
from peagle.economics.prices import Offer, PriceTable
from peagle.engine.keys import TargetOptions
from peagle.engine.sagemaker import MODEL_FOLDER, to_sagemaker_env, vllm_arguments
from peagle.engine.spec import DrafterSpec, DraftMethod
from peagle.errors import ConfigError, PriceError
from peagle.key_values import parse_pairs

HEAD_CHANNEL = "eagle"  # as in JumpStart
HEAD_FOLDER = Path("/opt/ml/additional-model-data-sources") / HEAD_CHANNEL  # where SageMaker mounts the channel


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's settings in a container: environment variables, and the drafter with the reason for choosing it.

    The folders are local, and must be mounted in the container as `MODEL_FOLDER` and `HEAD_FOLDER`. A folder is None if
    the container loads the weights from the hub.
    """

    variables: dict[str, str] = field(default_factory=dict)
    drafter: str
    model_folder: Path | None = None
    head_folder: Path | None = None

    @property
    def uploads(self) -> list[tuple[Path, Path]]:
        """Local folders, and the paths where SageMaker must mount their data."""
        mounts = ((self.model_folder, MODEL_FOLDER), (self.head_folder, HEAD_FOLDER))
        return [(folder, path) for folder, path in mounts if folder is not None]


def preset(
    card: ModelCard,
    *,
    instance_type: str | None = None,
    concurrency: int | None = None,
    has_model_data: bool = False,
    has_head_data: bool = False,
) -> Preset:
    """Return the settings of a catalog model.

    K is taken from a published SageMaker deployment, preferably on `instance_type`, or else from the card's advice.

    Args:
        concurrency: use the card's advice for this many concurrent requests instead of a published deployment.
        has_model_data, has_head_data: whether SageMaker mounts the model and the head.
    """
    model_folder = Path(card.source.id) if card.source.kind == "folder" else None
    if card.source.kind == "package":
        model = EMBEDDED_TARGETS[embedded_name(card.source.id)].upstream_id
    else:
        model = card.source.id
    if model_folder or has_model_data:
        model = str(MODEL_FOLDER)
    method, k, reason = _speculation(card, instance_type, concurrency)
    if method is None:
        return Preset(variables={"SM_VLLM_MODEL": model}, drafter=reason, model_folder=model_folder)
    head = card.heads[method]
    head_folder = None
    if head.kind == "shipped":
        head_folder = complete_head(HEADS_FOLDER / str(head.id))
    elif head.kind != "huggingface":
        head_folder = Path(str(head.id))
    path = str(HEAD_FOLDER) if head_folder or has_head_data else str(head.id)
    spec = DrafterSpec(method=method, model=path, num_speculative_tokens=k)
    return Preset(
        variables={"SM_VLLM_MODEL": model, **to_sagemaker_env(spec)},
        drafter=f"{method}, K={k}: {reason}",
        model_folder=model_folder,
        head_folder=head_folder,
    )


def _speculation(
    card: ModelCard, instance_type: str | None, concurrency: int | None
) -> tuple[DraftMethod | None, int, str]:
    """Return the method, K, and the reason. Without a drafter, the method is None."""
    heads = {method: head for method, head in card.heads.items() if head.published}
    if not heads:
        return None, 0, "none, because no head is published for the model"
    deployments = [
        (method, deployment)
        for method, head in heads.items()
        for deployment in head.deployments
        if "SageMaker" in deployment.where
    ]
    if deployments and concurrency is None:
        method, chosen = min(deployments, key=lambda pair: pair[1].instance_type != instance_type)
        return method, chosen.num_speculative_tokens, f"{chosen.where}, {chosen.instance_type} [{chosen.source}]"
    advice = card.speculation_for(concurrency or 1)
    if advice is None:
        concurrency_text = f" for {concurrency} concurrent requests" if concurrency else ""
        return None, 0, f"none, because nothing was measured or published{concurrency_text}"
    if advice.method == "none":
        return None, 0, f"none, because a drafter would cost more than it saves [{advice.source}]"
    limit = "any number of" if advice.max_concurrency is None else f"up to {advice.max_concurrency}"
    return advice.method, advice.num_speculative_tokens, f"advice for {limit} concurrent requests [{advice.source}]"


MAX_START_S = 3600  # SageMaker's limit
_MAX_NAME_LENGTH, _MAX_VALUE_LENGTH = 63, 1024
_S3_FORM = re.compile(r"s3://[^/]+/.+"), "s3://BUCKET/FOLDER"
_FORMS = {  # by field: the pattern, and an example for the error message
    "instance_type": (re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+"), "ml.g7e.2xlarge"),
    "role": (re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/.+"), "arn:aws:iam::123456789012:role/NAME"),
    "name": (re.compile(r"(?=.{1,63}$)[a-zA-Z0-9](-*[a-zA-Z0-9])*"), "my-endpoint: up to 63 letters, digits, hyphens"),
    "model_data": _S3_FORM,
    "head_data": _S3_FORM,
}


class SageMakerOptions(BaseModel):
    """The options of `peagle deploy sagemaker`. Descriptions are the help texts of the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    instance_type: str = Field(description="SageMaker's name of the instance type, such as ml.g7e.2xlarge")
    image: str = Field(description="peagle's image, or AWS's vLLM image, in your registry (ECR) in that region")
    role: str = Field(description="ARN of the container's role, which can read the image and the model's data")
    name: str | None = Field(None, description="name of the endpoint; default: the model's")
    region: str | None = Field(None, description="AWS region; default: from your AWS configuration")
    instances: int = Field(1, ge=1, description="number of instances, each with one engine")
    concurrency: int | None = Field(
        None, ge=1, description="concurrent requests to choose the drafter for; default: as in published deployments"
    )
    max_model_len: int | None = Field(None, ge=16, description="context in tokens; default: the model's own")
    model_data: str | None = Field(None, description="s3:// folder for /opt/ml/model; default: load it from the hub")
    head_data: str | None = Field(None, description="s3:// folder of the drafter; default: load it from the hub")
    ami_version: str | None = Field(None, description="SageMaker's name of the instances' AMI (NVIDIA's driver)")
    usd_per_hour: float | None = Field(
        None, gt=0, description="SageMaker's price of one instance; default: EC2's in the table, which may be lower"
    )
    variables: dict[str, str] = Field(
        default_factory=dict,
        description="an additional variable of the container, as KEY=VALUE; may be repeated; a map in YAML",
        json_schema_extra={"flag": "variable", "metavar": "KEY=VALUE"},
    )

    @field_validator("variables", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return parse_pairs(value) if isinstance(value, list) else value

    @field_validator("instance_type", "role", "model_data", "head_data", "name")
    @classmethod
    def _check_form(cls, value: str | None, info: ValidationInfo) -> str | None:
        form, example = _FORMS[str(info.field_name)]
        if value is not None and not form.fullmatch(value):
            raise ValueError(f"must have the form {example}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationRequests:
    """The three requests that create an endpoint, as arguments of boto3, with the hourly price and its source."""

    name: str
    model: dict[str, Any]
    endpoint_config: dict[str, Any]
    endpoint: dict[str, Any]
    usd_per_hour: float
    price: str  # the source of the price

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_requests(card: ModelCard, options: SageMakerOptions, settings: Preset) -> CreationRequests:
    """Return the requests for a model with its preset."""
    offer = known_offer(options)
    tensor_parallel_size = str(vllm_arguments(options.variables).get("tensor_parallel_size", 1))
    if offer is not None and tensor_parallel_size.isdecimal():
        target = TargetOptions.model_validate(
            {"model": card.name, "tensor_parallel_size": max(1, int(tensor_parallel_size))}
        )
        require_room(offer, target)
    name = options.name or re.sub(r"[^a-zA-Z0-9-]+", "-", card.name)[:_MAX_NAME_LENGTH].strip("-")
    usd_per_hour, price = _price(options)
    container: dict[str, Any] = {"Image": options.image, "Environment": _variables(options, settings, usd_per_hour)}
    if options.model_data:
        container["ModelDataSource"] = {"S3DataSource": _s3_source(options.model_data)}
    if options.head_data:
        container["AdditionalModelDataSources"] = [
            {"ChannelName": HEAD_CHANNEL, "S3DataSource": _s3_source(options.head_data)}
        ]
    for folder, data, flag in (
        (settings.model_folder, options.model_data, "--model-data"),
        (settings.head_folder, options.head_data, "--head-data"),
    ):
        if folder is not None and data is None:
            raise ConfigError(
                f"{folder} is only on this machine, so SageMaker's instances cannot load it",
                hint=f"upload it with aws s3 cp --recursive {folder} s3://BUCKET/FOLDER/, and use {flag}",
            )
    variant = {
        "VariantName": "all",
        "ModelName": name,
        "InstanceType": options.instance_type,
        "InitialInstanceCount": options.instances,
        "ContainerStartupHealthCheckTimeoutInSeconds": MAX_START_S,
        "ModelDataDownloadTimeoutInSeconds": MAX_START_S,
        **({"InferenceAmiVersion": options.ami_version} if options.ami_version else {}),
    }
    tags = [{"Key": "peagle", "Value": card.name}]
    return CreationRequests(
        name=name,
        model={"ModelName": name, "ExecutionRoleArn": options.role, "PrimaryContainer": container, "Tags": tags},
        endpoint_config={"EndpointConfigName": name, "ProductionVariants": [variant], "Tags": tags},
        endpoint={"EndpointName": name, "EndpointConfigName": name, "Tags": tags},
        usd_per_hour=options.instances * usd_per_hour,
        price=price,
    )


def known_offer(options: SageMakerOptions) -> Offer | None:
    """Return EC2's offer of the instance type, or None if it is not in the price table."""
    return PriceTable.load().offer(options.instance_type.removeprefix("ml."))


def _price(options: SageMakerOptions) -> tuple[float, str]:
    """Return US dollars per instance and hour, and the source of the price."""
    if options.usd_per_hour is not None:
        return options.usd_per_hour, "as stated"
    try:
        ec2 = PriceTable.load().price(options.instance_type.removeprefix("ml."), provider="aws", region=options.region)
    except PriceError as error:
        hint = "set SageMaker's price of one instance with --usd-per-hour"
        raise PriceError(f"the price of {options.instance_type} is unknown: {error.message}", hint=hint) from error
    return ec2.usd_per_hour, f"EC2's price of {ec2.instance_type}, {ec2.as_of}; SageMaker's own may be higher"


def _variables(options: SageMakerOptions, settings: Preset, usd_per_hour: float) -> dict[str, str]:
    variables = {
        "PEAGLE_SAGEMAKER": "true",
        "PEAGLE_USD_PER_HOUR": f"{usd_per_hour:g}",
        **settings.variables,
        **({"SM_VLLM_MAX_MODEL_LEN": str(options.max_model_len)} if options.max_model_len else {}),
        **options.variables,
    }
    for name, value in variables.items():
        if len(value) > _MAX_VALUE_LENGTH:
            raise ConfigError(
                f"the variable {name} has {len(value)} characters; SageMaker's limit is {_MAX_VALUE_LENGTH}"
            )
    return variables


def _s3_source(uri: str) -> dict[str, str]:
    return {"S3Uri": uri.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
