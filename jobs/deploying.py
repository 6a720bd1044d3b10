"""Shared code of the `peagle deploy` commands: arguments, the workload, YAML, and running clients such as kubectl."""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jobs.configurations import read_configuration
from peagle.deploy.workload import Workload, count_machines, dns_label, offer_of, require_room
from peagle.errors import CapacityError, ConfigError
from peagle.files import converted_write_errors, write_atomic
from peagle.private import user_path

_SPARE_S = 60.0  # added to the grace period: time to notice the signal, commit and exit


def add_common_arguments(parser: argparse.ArgumentParser, *, client: str) -> None:
    """Add the arguments of every `peagle deploy` command. `client` is the command that --apply runs."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML of `peagle generate` or `peagle serve`")
    parser.add_argument(
        "--name", metavar="TEXT", help="name of the created resources (default: peagle- and the file's name)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to this file instead of standard output")
    parser.add_argument("--apply", action="store_true", help=f"also apply the output with: {client}")


def read_workload(path: Path, name: str | None, *, max_name_length: int) -> Workload:
    """Return the workload of a configuration file.

    Raises:
        ConfigError: the configuration is invalid, or names no machine.
        CapacityError: the machine clearly cannot hold a model.
    """
    from pipelines.batch.config import GenerateConfig

    config = read_configuration(path)
    offer = offer_of(config)
    command: Literal["generate", "serve"]
    if isinstance(config, GenerateConfig):
        command, grace_s = "generate", config.grace_s
        require_room(
            offer,
            config,
            pipeline_parallel_size=config.pipeline_parallel_size,
            num_nodes=config.nodes_per_engine,
        )
        accelerators_per_node = config.accelerators_per_engine // config.nodes_per_engine
        engines = config.engine_range
        # Pairs as in `count_machines`: accelerators on one node, and the number of such nodes.
        min_engines = [(accelerators_per_node, engines.smallest * config.nodes_per_engine)]
        max_engines = [(accelerators_per_node, engines.largest * config.nodes_per_engine)]
    else:
        command, grace_s = "serve", max(model.drain_s for model in config.served)
        for model in config.served:
            require_room(offer, model, pipeline_parallel_size=model.pipeline_parallel_size)
        # An endpoint starts only if all its engines fit.
        min_engines = max_engines = [
            (model.tensor_parallel_size * model.pipeline_parallel_size, model.max_replicas) for model in config.served
        ]
    return Workload(
        name=dns_label(name or f"peagle-{path.stem}", max_length=max_name_length),
        command=command,
        # The profile's values are already merged in, and the profile file does not exist on the other machines.
        settings=config.model_dump(mode="json", exclude_unset=True, exclude={"profile"}),
        offer=offer,
        market=config.market,
        num_machines=(count_machines(offer, min_engines), count_machines(offer, max_engines)),
        grace_s=grace_s + _SPARE_S,
    )


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as literal blocks, and no aliases."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_text)
_Dumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]


def as_yaml(documents: Sequence[Any]) -> str:
    """Return the documents as one YAML text."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def write_file(text: str, output: Path | None) -> None:
    """Print the text, or write it to a file atomically.

    Raises:
        CapacityError: the file cannot be written.
    """
    if output is None:
        print(text, end="")
        return
    path = user_path(output)
    with converted_write_errors(path, hint="use another file for --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    print(f"written: {path}")


def run_client(command: Sequence[str], text: str, *, hint: str) -> None:
    """Run a client such as kubectl with `text` as its standard input.

    Raises:
        ConfigError: the client is not installed.
        CapacityError: the client failed; the message contains its output.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here, so nothing was applied", hint=hint)
    process = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    print(process.stdout, end="")
    if process.returncode:
        raise CapacityError(
            f"{' '.join(command)} exited with code {process.returncode}: {process.stderr.strip()}",
            hint="the resources listed above exist; run the same command to apply the others",
        )


def result_of(workload: Workload, **more: Any) -> dict[str, Any]:
    """Return the result of a `peagle deploy` command for --json, with `more` fields."""
    return {
        "name": workload.name,
        "command": workload.command,
        "instance_type": workload.offer.instance_type,
        "market": workload.market,
        "num_machines": list(workload.num_machines),
        **more,
    }
