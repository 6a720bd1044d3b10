"""Common parts of `peagle deploy TARGET`: read, write, run a client."""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from jobs.configurations import read_configuration
from peagle.deploy.room import require_room
from peagle.deploy.workload import Workload, label_of, machines_for, offer_of
from peagle.economics.prices import Offer
from peagle.errors import CapacityError, ConfigError
from peagle.files import write_atomic, writing
from peagle.private import user_path

if TYPE_CHECKING:
    from pipelines.batch.config import GenerateConfig
    from pipelines.online.config import ServeConfig

_SPARE_S = 60.0  # beside what units or requests under way get: to notice, to commit, to end


def add_common_arguments(parser: argparse.ArgumentParser, *, client: str) -> None:
    """The arguments that every target has.

    Args:
        client: the command that `--apply` runs.
    """
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML of `peagle generate` or `peagle serve`")
    parser.add_argument(
        "--name", metavar="TEXT", help="name of the created resources (default: peagle- and the file's name)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to this file instead of standard output")
    parser.add_argument("--apply", action="store_true", help=f"also run it: {client}")


def read_workload(path: Path, name: str | None, *, most_of_name: int) -> Workload:
    """The workload of a configuration's file.

    Raises:
        ConfigError: something in it is wrong, or no machine is named.
        CapacityError: the machine clearly cannot hold a model.
    """
    from pipelines.batch.config import GenerateConfig

    config = read_configuration(path)
    is_bulk = isinstance(config, GenerateConfig)
    offer = offer_of(config)
    _require_room(config, offer)
    fewest, most = _bulk_parts(config) if isinstance(config, GenerateConfig) else _endpoint_parts(config)
    grace_s = config.grace_s if isinstance(config, GenerateConfig) else max(one.drain_s for one in config.served)
    return Workload(
        name=label_of(name or f"peagle-{path.stem}", most=most_of_name),
        command="generate" if is_bulk else "serve",
        # A profile's keys are among those that are set, and its file is on no other machine.
        keys=config.model_dump(mode="json", exclude_unset=True, exclude={"profile"}),
        offer=offer,
        market=config.market,
        num_machines=(machines_for(offer, fewest), machines_for(offer, most)),
        grace_s=grace_s + _SPARE_S,
    )


class _Block(yaml.SafeDumper):
    """Text of several lines stands as it is."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Block.add_representer(str, _text)
# Parts that several pods have stand in each of them.
_Block.ignore_aliases = lambda *_: True  # type: ignore[method-assign]


def as_yaml(documents: Sequence[Any]) -> str:
    """The text of a file with these documents."""
    return yaml.dump_all(documents, Dumper=_Block, sort_keys=False, allow_unicode=True, width=120)


def write_file(text: str, output: Path | None) -> None:
    """Print the file, or write it whole.

    Raises:
        CapacityError: it cannot be written.
    """
    if output is None:
        print(text, end="")
        return
    path = user_path(output)
    with writing(path, hint="name another file with --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    print(f"written: {path}")


def run_client(command: Sequence[str], text: str, *, hint: str) -> None:
    """Run a target's client with the file on its standard input.

    Raises:
        ConfigError: the client is not installed.
        CapacityError: it refused; its own words.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here, so nothing was applied", hint=hint)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise CapacityError(
            f"{' '.join(command)} ended with code {done.returncode}: {done.stderr.strip()}",
            hint="the resources listed above exist; the same command applies the rest",
        )


def _require_room(config: "GenerateConfig | ServeConfig", offer: Offer) -> None:
    from pipelines.batch.config import GenerateConfig

    if isinstance(config, GenerateConfig):
        num_nodes, stages = config.nodes_per_engine, config.pipeline_parallel_size
        require_room(offer, config, pipeline_parallel_size=stages, num_nodes=num_nodes)
        return
    for one in config.served:
        require_room(offer, one, pipeline_parallel_size=one.pipeline_parallel_size)


Parts = list[tuple[int, int]]


def _bulk_parts(config: "GenerateConfig") -> tuple[Parts, Parts]:
    """Parts of the fewest and of the most engines, as `machines_for` takes them."""
    size = config.accelerators_per_engine // config.nodes_per_engine
    engines = config.engine_range
    return [(size, engines.smallest * config.nodes_per_engine)], [(size, engines.largest * config.nodes_per_engine)]


def _endpoint_parts(config: "ServeConfig") -> tuple[Parts, Parts]:
    """Parts of all engines at once: an endpoint starts only where they fit."""
    parts = [(one.tensor_parallel_size * one.pipeline_parallel_size, one.max_replicas) for one in config.served]
    return parts, parts


def result_of(workload: Workload, **more: Any) -> dict[str, Any]:
    """The result of a target's command as data."""
    return {
        "name": workload.name,
        "command": workload.command,
        "instance_type": workload.offer.instance_type,
        "market": workload.market,
        "num_machines": list(workload.num_machines),
        **more,
    }
