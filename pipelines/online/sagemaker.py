"""The endpoint in a SageMaker container.

SageMaker runs `docker run IMAGE serve`, passes settings in environment variables, and only uses port 8080:
`GET /ping` and `POST /invocations`. PEAGLE_SAGEMAKER=true selects this mode.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from peagle.engine.sagemaker import MODEL_FOLDER, PREFIX, parse_switch, serve_options
from pipelines.online.config import ServeConfig

VARIABLE = "PEAGLE_SAGEMAKER"
_MAX_DRAIN_S = 20  # of the 30 s between SIGTERM and SIGKILL; the remaining time is for stopping Serve and Ray


class SageMakerConfig(ServeConfig):
    """The configuration in a SageMaker container.

    Without keys, anyone who can connect to the port can send requests; SageMaker checks IAM before it forwards a
    request.
    """

    is_behind_sagemaker: ClassVar[bool] = True

    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(8080, ge=1, le=65535, description="port to listen on; SageMaker uses 8080")
    drain_s: float = Field(
        15, ge=0, le=_MAX_DRAIN_S, description="time for running requests to finish when SageMaker stops the container"
    )
    min_replicas: int = Field(
        1, ge=1, description="minimum engines per model; with 0 SageMaker would consider the container dead"
    )

    @model_validator(mode="before")
    @classmethod
    def _require_model_name(cls, values: Any) -> Any:
        """Require a model, because the default model outside SageMaker is only a toy."""
        if isinstance(values, dict) and not {"model", "models", "profile"} & values.keys():
            raise ValueError(f"no model: set SM_VLLM_MODEL or HF_MODEL_ID, or provide model data in {MODEL_FOLDER}")
        return values

    @model_validator(mode="after")
    def _check_contract(self) -> Self:
        if any(model.drain_s > _MAX_DRAIN_S or model.min_replicas < 1 for model in self.models):
            raise ValueError(
                f"models: on SageMaker, each needs drain_s of at most {_MAX_DRAIN_S} and min_replicas of at least 1"
            )
        if self.idle_timeout is not None:
            raise ValueError(
                "idle_timeout: SageMaker restarts a container that exits, and continues to bill; delete the endpoint"
            )
        return self


def is_enabled(env: Mapping[str, str]) -> bool:
    """Return whether PEAGLE_SAGEMAKER selects the SageMaker mode."""
    return parse_switch(VARIABLE, env.get(VARIABLE, ""))


def ignored_variables(env: Mapping[str, str]) -> str | None:
    """Return a note about SageMaker variables that are set but not read, or None."""
    # The mode is not inferred from these variables or from /opt/ml, since it opens the port to everyone, without keys.
    names = sorted(name for name in env if name.startswith(PREFIX))
    if env.get(VARIABLE, "").strip() or not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} ignored: {PREFIX}* variables are read only with {VARIABLE}=true, which listens on "
        f"0.0.0.0:8080 and admits everyone unless there are keys; {VARIABLE}=false hides this note"
    )


def config_class(env: Mapping[str, str]) -> type[ServeConfig]:
    return SageMakerConfig if is_enabled(env) else ServeConfig


def config_from_env(env: Mapping[str, str], *, model_folder: Path = MODEL_FOLDER) -> dict[str, Any]:
    """Return the options that SageMaker's variables set, by name; empty outside the SageMaker mode."""
    return serve_options(env, model_folder=model_folder) if is_enabled(env) else {}
