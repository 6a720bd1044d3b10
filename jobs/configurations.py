"""Configurations of commands: the command that a file is for, and its model."""

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
_OF_A_RUN = frozenset({"input", "output"})


def model_of(command: str) -> "type[BaseModel]":
    """The model of a command's configuration."""
    module, _, name = MODELS[command].partition(":")
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


def command_of(path: Path) -> str:
    """The command that a file is for: `generate` with input or output, else `serve`.

    Raises:
        ConfigError: the file cannot be read.
    """
    return "generate" if flags.keys_of(path) & _OF_A_RUN else "serve"


def read_configuration(path: Path) -> "GenerateConfig | ServeConfig":
    """The configuration of a bulk run or an endpoint, from its file alone.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    from pipelines.batch.config import GenerateConfig
    from pipelines.online.config import ServeConfig

    if command_of(path) == "generate":
        return flags.load_file(GenerateConfig, path)
    return flags.load_file(ServeConfig, path)
