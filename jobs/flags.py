"""Flags from a configuration model.

One definition gives the YAML key, the flag, its help and its check.

Priority: flag > environment (PEAGLE_<KEY>) > YAML > default.
"""

import argparse
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pydantic
import yaml
from pydantic.fields import FieldInfo

from jobs import removed
from jobs.output import is_unicode
from peagle.errors import ConfigError, did_you_mean
from peagle.ports import is_service_link
from peagle.storage import Place

Model = TypeVar("Model", bound=pydantic.BaseModel)


def add_flags(
    parser: argparse.ArgumentParser,
    model: type[pydantic.BaseModel],
    groups: Mapping[str, list[str]],
    *,
    short: Mapping[str, str] = MappingProxyType({}),
    yaml_only: Collection[str] = (),
    hidden: Collection[str] = (),
) -> None:
    """Add a flag for each field of `model`, and `--config`.

    The flags are under the headings of `groups`, in the order of their names there.

    Args:
        short: one-letter names.
        yaml_only: fields that no flag can express.
        hidden: fields whose flags the help leaves out: for those who test peagle itself.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with any of these keys (flags win over it)")
    sections = {heading: parser.add_argument_group(heading) for heading in groups}
    headings = {name: sections[heading] for heading, names in groups.items() for name in names}
    for name in dict.fromkeys([*headings, *model.model_fields]):
        if name in yaml_only:
            continue
        field = model.model_fields[name]
        text = argparse.SUPPRESS if name in hidden else _help(field)
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        names = [*([short[name]] if name in short else []), f"--{name.replace('_', '-')}"]
        kind, form = _plain(field.annotation), field.json_schema_extra
        if isinstance(form, dict) and "flag" in form:  # a map, of which a flag gives one entry
            names = [f"--{form['flag']}"]
            options |= {"action": "append", "metavar": form["metavar"]}
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list:
            options |= {"action": "append", "metavar": "TEXT", "help": f"{text}; may be repeated"}
        elif typing.get_origin(kind) is typing.Literal:
            options["metavar"] = "|".join(map(str, typing.get_args(kind)))
        else:
            options["metavar"] = _METAVARS.get(kind, "TEXT")
        headings.get(name, parser).add_argument(*names, **options)


def load(
    model: type[Model],
    args: argparse.Namespace,
    foreign: Mapping[str, Any] = MappingProxyType({}),
    foreign_variable: Callable[[str], str] = str,
) -> Model:
    """Return the configuration that flags, environment and YAML add up to.

    Args:
        foreign: keys that the variables of another program set. They win over the YAML, and PEAGLE_* over them.
        foreign_variable: returns the variable that sets such a key.

    Raises:
        ConfigError: the YAML is unreadable, a key unknown, or a value not what its key takes.
    """
    known = model.model_fields
    values = _from_yaml(args.config, known) if args.config else {}
    set_there = _from_environment(known)
    flags = {name: getattr(args, name) for name in known if hasattr(args, name)}
    args.variables = {name: foreign_variable(name) for name in foreign} | {name: _variable(name) for name in set_there}
    args.variables = {name: variable for name, variable in args.variables.items() if name not in flags}
    args.in_yaml = frozenset(values)
    return _checked(model, values | dict(foreign) | set_there | flags, args.variables)


def load_file(model: type[Model], path: Path) -> Model:
    """The configuration of a YAML file alone, as it will be read on another machine.

    Raises:
        ConfigError: as `load`.
    """
    return _checked(model, _from_yaml(path, model.model_fields), {})


def keys_of(path: Path) -> frozenset[str]:
    """The keys of a YAML file, whatever command they are for.

    Raises:
        ConfigError: it is unreadable, or holds no keys.
    """
    return frozenset(map(str, _mapping(path)))


def origins(config: pydantic.BaseModel, args: argparse.Namespace) -> dict[str, str]:
    """Where each key's value came from: flag, environment, YAML, profile or default.

    Args:
        config: as `load` made it of `args`.
    """
    return {name: _origin(name, config, args) for name in type(config).model_fields}


def _origin(name: str, config: pydantic.BaseModel, args: argparse.Namespace) -> str:
    if hasattr(args, name):
        return "flag"
    if name in args.variables:
        return f"environment, {args.variables[name]}"
    if name in args.in_yaml:
        return str(args.config)
    # Keys that nobody said are set by a profile alone.
    return f"profile {getattr(config, 'profile', None)}" if name in config.model_fields_set else "default"


def _checked(model: type[Model], values: Mapping[str, Any], variables: Mapping[str, str]) -> Model:
    try:
        return model(**values)
    except pydantic.ValidationError as error:
        raise ConfigError("\n  ".join(_explain(e, variables) for e in error.errors())) from None


_METAVARS = {int: "N", float: "X", Path: "PATH", Place: "PATH", str: "TEXT"}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 2:8 and 18:30 as numbers to the base of 60; here they are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [("tag:yaml.org,2002:str", re.compile(r"\d+(:\d+)+$")), *resolvers]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _variable(name: str) -> str:
    return f"PEAGLE_{name.upper()}"


def _from_environment(known: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """The keys that environment variables set.

    An empty variable sets nothing, nor do those that Kubernetes sets for a service.
    """
    found: dict[str, Any] = {}
    for name, field in known.items():
        value = os.environ.get(_variable(name), "")
        if not is_unicode(value):
            raise ConfigError(f"{_variable(name)} is not UTF-8: {os.fsencode(value)!r}")
        if value and not (name.endswith("port") and is_service_link(value)):
            found[name] = [value] if typing.get_origin(_plain(field.annotation)) is list else value
    return found


def _from_yaml(path: Path, known: Mapping[str, FieldInfo]) -> dict[str, Any]:
    values = _mapping(path)
    for key in values:
        if key in known:
            continue
        if instead := removed.KEYS.get(str(key)):
            raise ConfigError(f"--config {path}: the key {key!r} was removed", hint=instead)
        raise ConfigError(f"--config {path}: unknown key {key!r}", hint=did_you_mean(str(key), known))
    return values


def _mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: it must hold keys and values, one a line")
    return values


def _explain(error: Any, variables: Mapping[str, str]) -> str:
    """Return one fault with its place.

    Args:
        variables: by key, the environment variable that set it.
    """
    where = ".".join(map(str, error["loc"]))
    if error["loc"] and (variable := variables.get(str(error["loc"][0]))):
        where = variable
    if error["type"] == "missing":
        return f"--{where.replace('_', '-')} is needed"
    if error["type"] == "unexpected_keyword_argument":
        return f"{where}: no such key"
    message = str(error["msg"]).removeprefix("Value error, ")
    if not where:
        return message
    # A validator of ours that takes many values names the wrong one itself.
    is_named = error["type"] == "value_error" and isinstance(error["input"], list | dict)
    return f"{where}: {message}" if is_named else f"{where}: {message}, not {error['input']!r}"


def _plain(annotation: Any) -> Any:
    """The annotation without `| None`."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = [a for a in typing.get_args(annotation) if a is not type(None)]
    return annotation


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    has_default = not field.is_required() and field.default is not None and field.default_factory is None
    return f"{text} (default: {field.default})" if has_default and field.default is not False else text
