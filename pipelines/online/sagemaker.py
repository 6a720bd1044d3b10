"""The endpoint in a container on SageMaker, with its contract's defaults.

SageMaker runs `docker run IMAGE serve`, says the rest in variables, and asks port 8080 alone: `GET /ping`, and
`POST /invocations` with a client's body. With ENTRYPOINT ["peagle"] that is `peagle serve`, and PEAGLE_SAGEMAKER=true
says that it is meant so. A variable, since a container of SageMaker's gets nothing else; and no script `serve`, since
Ray's own command has that name.

It knows keys and variables, no HTTP.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from peagle.engine.sagemaker import MODEL_FOLDER, serve_keys
from peagle.errors import ConfigError
from pipelines.online.config import ServeConfig

VARIABLE = "PEAGLE_SAGEMAKER"
_MOST_DRAIN_S = 20  # of the 30 s between SIGTERM and SIGKILL; the rest is for ending Serve and Ray


class SageMakerConfig(ServeConfig):
    """The endpoint in a container of SageMaker's.

    Without keys whoever reaches its port is let in: SageMaker has asked IAM before, and nobody else reaches it.
    """

    is_behind_sagemaker: ClassVar[bool] = True

    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(8080, ge=1, le=65535, description="port to listen on; SageMaker uses 8080")
    drain_s: float = Field(
        15, ge=0, le=_MOST_DRAIN_S, description="time for running requests when SageMaker stops the container"
    )
    min_replicas: int = Field(
        1, ge=1, description="engines that are always up: without one SageMaker takes the container for dead"
    )

    @model_validator(mode="before")
    @classmethod
    def _names_a_model(cls, values: Any) -> Any:
        """Require a model: the embedded one, which is the default elsewhere, is a toy."""
        if isinstance(values, dict) and not {"model", "models", "profile"} & values.keys():
            raise ValueError(f"there is no model: set SM_VLLM_MODEL or HF_MODEL_ID, or give data for {MODEL_FOLDER}")
        return values

    @model_validator(mode="after")
    def _keeps_the_contract(self) -> Self:
        if any(one.drain_s > _MOST_DRAIN_S or one.min_replicas < 1 for one in self.models):
            raise ValueError(
                f"models: each needs drain_s of at most {_MOST_DRAIN_S} and min_replicas of at least 1 here"
            )
        if self.idle_timeout is not None:
            raise ValueError(
                "idle_timeout: SageMaker restarts a container that exits, and continues to bill; delete the endpoint"
            )
        return self


def is_meant(env: Mapping[str, str]) -> bool:
    """Whether the variables say that SageMaker runs this container.

    Raises:
        ConfigError: they say something that is neither yes nor no.
    """
    value = env.get(VARIABLE, "").strip().lower()
    if value not in ("", "true", "false", "1", "0"):
        raise ConfigError(f"{VARIABLE} must be true or false, not {env[VARIABLE]!r}")
    return value in ("true", "1")


def config_class(env: Mapping[str, str]) -> type[ServeConfig]:
    """The configuration of `peagle serve` where these variables are set."""
    return SageMakerConfig if is_meant(env) else ServeConfig


def variables(env: Mapping[str, str], *, model_folder: Path = MODEL_FOLDER) -> dict[str, Any]:
    """The keys that SageMaker's variables set; none elsewhere than in its container.

    Raises:
        ConfigError: one has a value that peagle does not carry.
    """
    return serve_keys(env, model_folder=model_folder) if is_meant(env) else {}
