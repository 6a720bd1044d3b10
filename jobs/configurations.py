"""Find the configuration model of a command, and the command that a configuration file is for."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import flags

if TYPE_CHECKING:
    from pydantic import BaseModel

    from pipelines.batch.config import GenerateConfig
    from pipelines.online.config import ServeConfig

MODELS = {
    "bench": "peagle.bench.config:BenchConfig",
    "evaluate": "peagle.bench.config:EvaluateConfig",
    "generate": "pipelines.batch.config:GenerateConfig",
    "plan": "peagle.planning.config:PlanConfig",
    "serve": "pipelines.online.config:ServeConfig",
    "train": "peagle.drafter.config:TrainConfig",
    "tune": "peagle.tuning.config:TuneConfig",
}


def model_of(command: str) -> "type[BaseModel]":
    """Import the configuration model of a command."""
    module, _, name = MODELS[command].partition(":")
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


def command_of(path: Path) -> str:
    """Return the command that a file configures: `generate` if it has an input or output, else `serve`.

    Raises:
        ConfigError: the file cannot be read.
    """
    return "generate" if flags.keys_of(path) & {"input", "output"} else "serve"


def read_configuration(path: Path) -> "GenerateConfig | ServeConfig":
    """Load the configuration file of a bulk run or an endpoint, ignoring flags and environment variables.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    from pipelines.batch.config import GenerateConfig
    from pipelines.online.config import ServeConfig

    if command_of(path) == "generate":
        return flags.load_file(GenerateConfig, path)
    return flags.load_file(ServeConfig, path)
