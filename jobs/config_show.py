"""`peagle config show`: each key of a configuration with its value and origin."""

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import flags
from jobs.configurations import command_of, model_of
from peagle.errors import PeagleError
from peagle.plain_json import to_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from peagle.engine_options import Settled

HELP = """\
Print each key of a bulk run or an endpoint with its value and its origin: a flag, the environment, the YAML, a profile,
the catalog, the machine, or the default.

  peagle config show examples/job.yaml
  peagle config show job.yaml --engines 4 --precision bf16

Flags are those of the command that FILE is for: `peagle generate` where it has input or output, else `peagle serve`.
Keys that are left open (drafter: auto, precision: auto, no price) are shown as the command would settle them on the
machine that the file names, or else on this one. `peagle generate --dry-run` also reads the corpus.
"""
PASSES_ON = True
_UNLISTED = ("fake",)  # for those who test peagle itself: no help lists it either


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `peagle config show`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML of `peagle generate` or `peagle serve`")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Resolve, and print the table."""
    command = command_of(args.file)
    parser = argparse.ArgumentParser(prog=f"peagle config show {args.file}", usage=f"%(prog)s [FLAGS of {command}]")
    importlib.import_module(f"jobs.{command}").add_arguments(parser)
    own = parser.parse_args(["--config", str(args.file), *args.passed_on])
    config = flags.load(model_of(command), own)
    args.variables = own.variables
    origins = flags.origins(config, own)
    found = {name: (getattr(config, name), origins[name]) for name in origins if name not in _UNLISTED}
    try:
        settled = _settled(config)
    except PeagleError:
        _show(found)
        raise
    _show(found | settled)
    return 0, {name: {"value": _plain(value), "from": origin} for name, (value, origin) in (found | settled).items()}


def _settled(config: "BaseModel") -> "Settled":
    """The keys that the configuration leaves open, as its command would settle them.

    Raises:
        PeagleError: what would refuse the command.
    """
    from pipelines.batch.config import GenerateConfig

    if isinstance(config, GenerateConfig):
        from pipelines.batch.forecast import settled as settled_run

        return settled_run(config)
    from pipelines.online.config import ServeConfig
    from pipelines.online.forecast import settled as settled_endpoint

    assert isinstance(config, ServeConfig), "the two commands that a file may be for"
    return settled_endpoint(config)


def _show(rows: "Settled") -> None:
    width = max(map(len, rows))
    texts = {name: _text(value) for name, (value, _) in rows.items()}
    of_values = min(max(map(len, texts.values())), 44)
    for name, (_, origin) in rows.items():
        print(f"{name:<{width}}  {texts[name]:<{of_values}}  {origin}")


def _text(value: Any) -> str:
    plain = _plain(value)
    return "-" if plain is None else plain if isinstance(plain, str) else to_json(plain)


def _plain(value: Any) -> Any:
    """The value as JSON has it; a model of the endpoint is the keys that were said."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    return value if value is None or isinstance(value, str | int | float | dict) else str(value)
