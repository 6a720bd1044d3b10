"""`peagle config show`: each key of a configuration with its value and origin."""

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import flags
from jobs.configurations import command_of, model_of
from peagle.plain_json import to_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from peagle.engine_options import ResolvedDefaults

HELP = """\
Print each key of a bulk run or an endpoint with its value and its origin: a flag, the environment, the YAML, a profile,
the catalog, the machine, or the default.

  peagle config show examples/job.yaml
  peagle config show job.yaml --engines 4 --precision bf16

FILE configures `peagle generate` if it has input or output, else `peagle serve`. All flags of that command are
accepted. Keys without a fixed value (drafter: auto, precision: auto, no price) are shown as the command would resolve
them on the machine that FILE names, or else on this machine. `peagle generate --dry-run` also reads the corpus.
"""
FORWARDS_ARGS = True
_UNLISTED = ("fake",)  # only for tests of peagle itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML of `peagle generate` or `peagle serve`")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    command = command_of(args.file)
    parser = argparse.ArgumentParser(prog=f"peagle config show {args.file}", usage=f"%(prog)s [FLAGS of {command}]")
    importlib.import_module(f"jobs.{command}").add_arguments(parser)
    command_args = parser.parse_args(["--config", str(args.file), *args.forwarded])
    config = flags.load(model_of(command), command_args)
    args.variables = command_args.variables
    origins = flags.origins(config, command_args)
    entries = {name: (getattr(config, name), origins[name]) for name in origins if name not in _UNLISTED}
    try:
        entries |= _resolved_defaults(config)
    finally:  # even if the command would refuse the configuration
        _show(entries)
    return 0, {name: {"value": _plain(value), "from": origin} for name, (value, origin) in entries.items()}


def _resolved_defaults(config: "BaseModel") -> "ResolvedDefaults":
    """Return the values that the command would choose for unset keys. Raises the command's errors."""
    from pipelines.batch.config import GenerateConfig

    if isinstance(config, GenerateConfig):
        from pipelines.batch.forecast import resolve_unset_options as resolve_run

        return resolve_run(config)
    from pipelines.online.config import ServeConfig
    from pipelines.online.forecast import resolve_unset_options as resolve_endpoint

    assert isinstance(config, ServeConfig)
    return resolve_endpoint(config)


def _show(entries: "ResolvedDefaults") -> None:
    texts = {name: _text(value) for name, (value, _) in entries.items()}
    name_width = max(map(len, entries))
    value_width = min(max(map(len, texts.values())), 44)
    for name, (_, origin) in entries.items():
        print(f"{name:<{name_width}}  {texts[name]:<{value_width}}  {origin}")


def _text(value: Any) -> str:
    plain = _plain(value)
    if plain is None:
        return "-"
    return plain if isinstance(plain, str) else to_json(plain)


def _plain(value: Any) -> Any:
    """Return a value as JSON; for an endpoint's model, only the keys that were set."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    return value if value is None or isinstance(value, str | int | float | dict) else str(value)
