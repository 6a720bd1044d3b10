"""Flags, environment variables and YAML keys of a configuration model.

The model defines the name, help and validation of each key. Priority: flag > PEAGLE_<KEY> > YAML > default.
"""

import argparse
import functools
import json
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
from peagle.storage import StoragePath

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
    """Add `--config` and a flag for each field of `model`.

    Args:
        groups: fields by heading, in the order of the help.
        short: one-letter flags by field.
        yaml_only: fields without a flag.
        hidden: fields whose flags are not in the help.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with any of these keys (flags override it)")
    sections = {heading: parser.add_argument_group(heading) for heading in groups}
    group_of_field = {name: sections[heading] for heading, names in groups.items() for name in names}
    for name in dict.fromkeys([*group_of_field, *model.model_fields]):
        if name in yaml_only:
            continue
        field = model.model_fields[name]
        help_text = argparse.SUPPRESS if name in hidden else _help_text(field)
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
        flags = [*([short[name]] if name in short else []), f"--{name.replace('_', '-')}"]
        value_type, extra = _without_none(field.annotation), field.json_schema_extra
        if isinstance(extra, dict) and "flag" in extra:  # a map; each flag adds one entry
            flags = [f"--{extra['flag']}"]
            options |= {"action": "append", "metavar": extra["metavar"]}
        elif value_type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(value_type) is list:
            options |= {"action": "append", "metavar": "TEXT", "help": f"{help_text}; may be repeated"}
        elif typing.get_origin(value_type) is typing.Literal:
            options["metavar"] = "|".join(map(str, typing.get_args(value_type)))
        else:
            options["metavar"] = _METAVARS.get(value_type, "TEXT")
        group_of_field.get(name, parser).add_argument(*flags, **options)
        for old_name in _old_names(name, model.model_fields):
            type_option = {} if "action" in options else {"type": functools.partial(removed.to_new_unit, old_name)}
            old_options = {**options, "help": argparse.SUPPRESS, **type_option}
            parser.add_argument(f"--{old_name.replace('_', '-')}", **old_options)


def load(
    model: type[Model],
    args: argparse.Namespace,
    foreign: Mapping[str, Any] = MappingProxyType({}),
    foreign_variable: Callable[[str], str] = str,
) -> Model:
    """Return the configuration from flags, environment and YAML. Sets attributes of `args` for `origins`.

    Args:
        foreign: values from variables that are not PEAGLE_*, by key. They override the YAML; PEAGLE_* overrides them.
        foreign_variable: returns the name of the variable that set such a key.

    Raises:
        ConfigError: the YAML cannot be read, a key is unknown, or a value is invalid.
    """
    fields = model.model_fields
    values = _from_yaml(args.config, fields) if args.config else {}
    from_environment = _from_environment(fields)
    flags = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    variables = {name: foreign_variable(name) for name in foreign}
    variables |= {name: _variable(name) for name in from_environment}
    args.variables = {name: variable for name, variable in variables.items() if name not in flags}
    args.in_yaml = frozenset(values)
    return _validate(model, values | dict(foreign) | from_environment | flags, args.variables)


def to_arguments(config: pydantic.BaseModel) -> list[str]:
    """Return command-line flags for the keys that were set in `config`."""
    result: list[str] = []
    for name, value in config.model_dump(mode="json", exclude_unset=True).items():
        extra = type(config).model_fields[name].json_schema_extra
        flag = f"--{extra['flag'] if isinstance(extra, dict) and 'flag' in extra else name.replace('_', '-')}"
        if isinstance(value, bool):
            result.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, dict) and flag != f"--{name}":
            result += [argument for key, item in value.items() for argument in (flag, f"{key}={item}")]
        elif isinstance(value, list):
            result += [argument for item in value for argument in (flag, str(item))]
        elif value is not None:
            result += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return result


def load_file(model: type[Model], path: Path) -> Model:
    """Load a configuration from a YAML file, ignoring flags and environment variables. Raises the errors of `load`."""
    return _validate(model, _from_yaml(path, model.model_fields), {})


def keys_of(path: Path) -> frozenset[str]:
    """Return the top-level keys of a YAML file, whichever command it is for.

    Raises:
        ConfigError: the file cannot be read, or has no keys.
    """
    return frozenset(map(str, _read_mapping(path)))


def origins(config: pydantic.BaseModel, args: argparse.Namespace) -> dict[str, str]:
    """Return where each key's value came from: flag, environment, YAML, profile or default.

    Args:
        config: what `load` returned for `args`.
    """
    result = {}
    for name in type(config).model_fields:
        if hasattr(args, name):
            result[name] = "flag"
        elif name in args.variables:
            result[name] = f"environment, {args.variables[name]}"
        elif name in args.in_yaml:
            result[name] = str(args.config)
        elif name in config.model_fields_set:  # only a profile sets keys that the user did not set
            result[name] = f"profile {getattr(config, 'profile', None)}"
        else:
            result[name] = "default"
    return result


def _validate(model: type[Model], values: Mapping[str, Any], variables: Mapping[str, str]) -> Model:
    try:
        return model(**values)
    except pydantic.ValidationError as error:
        raise ConfigError("\n  ".join(_explain(e, variables) for e in error.errors())) from None


_METAVARS = {int: "N", float: "X", Path: "PATH", StoragePath: "PATH", str: "TEXT"}


class _Loader(yaml.SafeLoader):
    """Reads 2:8 and 18:30 as text. YAML 1.1 would read them as base-60 numbers."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it like this
        first: [("tag:yaml.org,2002:str", re.compile(r"\d+(:\d+)+$")), *resolvers]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _old_names(name: str, fields: Mapping[str, FieldInfo]) -> list[str]:
    return [old for old, new in removed.RENAMED.items() if new == name and old not in fields]


def _variable(name: str) -> str:
    return f"PEAGLE_{name.upper()}"


def _from_environment(fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Return the keys that PEAGLE_* variables set. Skips empty variables, and Kubernetes' variables for services."""
    values: dict[str, Any] = {}
    for name, field in fields.items():
        value: Any = os.environ.get(_variable(name), "")
        for old in _old_names(name, fields):
            value = value or removed.to_new_unit(old, os.environ.get(_variable(old), ""))
        if not is_unicode(str(value)):
            raise ConfigError(f"{_variable(name)} is not UTF-8: {os.fsencode(value)!r}")
        if value and not (name.endswith("port") and is_service_link(value)):
            values[name] = [value] if typing.get_origin(_without_none(field.annotation)) is list else value
    return values


def _from_yaml(path: Path, fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    values = {}
    for key, value in _read_mapping(path).items():
        is_old = key not in fields and removed.RENAMED.get(str(key)) in fields
        values[removed.RENAMED[key] if is_old else key] = removed.to_new_unit(key, value) if is_old else value
    for key in values:
        if key in fields:
            continue
        if replacement := removed.KEYS.get(str(key)):
            raise ConfigError(f"--config {path}: the key {key!r} was removed", hint=replacement)
        raise ConfigError(f"--config {path}: unknown key {key!r}", hint=did_you_mean(str(key), fields))
    return values


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must be a YAML mapping of keys to values")
    return values


def _explain(error: Any, variables: Mapping[str, str]) -> str:
    """Return one validation error with its location: the key, or the variable in `variables` that set it."""
    where = ".".join(map(str, error["loc"]))
    if error["loc"] and (variable := variables.get(str(error["loc"][0]))):
        where = variable
    if error["type"] == "missing":
        return f"--{where.replace('_', '-')} is required"
    if error["type"] == "unexpected_keyword_argument":
        return f"{where}: unknown key"
    if isinstance(error["input"], str) and (
        replacement := removed.VALUES.get((str(error["loc"][-1]) if error["loc"] else "", error["input"]))
    ):
        return f"{where}: {error['input']!r} was removed: {replacement}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if not where:
        return message
    # Peagle's validators of lists and maps name the invalid entry themselves.
    is_named = error["type"] == "value_error" and isinstance(error["input"], list | dict)
    return f"{where}: {message}" if is_named else f"{where}: {message}, not {error['input']!r}"


def _without_none(annotation: Any) -> Any:
    """Return the annotation without `| None`."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = [part for part in typing.get_args(annotation) if part is not type(None)]
    return annotation


def _help_text(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    has_default = not field.is_required() and field.default is not None and field.default_factory is None
    return f"{text} (default: {field.default})" if has_default and field.default is not False else text
