"""Prompt templates: sandboxed Jinja2 that treats null as missing and does not escape HTML in JSON.

A missing value (no such key, null or NaN) can be tested, compared and given a default. It cannot be printed.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import meta, nodes

from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.plain_json import is_nan, to_json


class Template:
    """A template over the columns of a row; raises ConfigError if it does not compile."""

    def __init__(self, text: str) -> None:
        try:
            self._tree = _ENVIRONMENT.parse(text)
            self._template = _ENVIRONMENT.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"prompt_template, line {error.lineno}: {error.message}") from error

    def require_columns(self, columns: Iterable[str]) -> None:
        """Raise an InputError if a column that every rendering reads is missing.

        Names that are used in branches or tests, or have a default, may be missing.
        """
        missing = meta.find_undeclared_variables(self._tree).difference(columns)
        assigned = {variable.name for variable in self._tree.find_all(nodes.Name) if variable.ctx != "load"}
        for name in sorted(missing.intersection(_needed(self._tree)) - assigned):
            raise InputError(f"prompt_template uses {name!r}, which is not a column", hint=did_you_mean(name, columns))

    def render(self, columns: Mapping[str, Any]) -> str:
        """Return the text for a row. Filters may raise any exception."""
        return self._template.render({name: _with_missing_values(value, name) for name, value in columns.items()})


class _Missing(jinja2.Undefined):
    """A missing value: false and equal to null; everything else raises."""

    __slots__ = ()

    def __str__(self) -> str:
        self._fail_with_undefined_error()

    __repr__ = __str__  # used when a list or dict is printed

    def __len__(self) -> int:
        self._fail_with_undefined_error()

    def __iter__(self) -> Iterator[Any]:
        self._fail_with_undefined_error()

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Missing)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)


def _with_missing_values(value: Any, name: str) -> Any:
    """Replace every null and NaN in a value with a missing value."""
    if value is None or is_nan(value):
        return _Missing(hint=f"{name!r} is {'null' if value is None else 'NaN'}", name=name)
    if isinstance(value, dict):
        return {key: _with_missing_values(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_with_missing_values(item, f"{name}[{index}]") for index, item in enumerate(value)]
    return value


def _check_printed(value: Any) -> Any:
    """Raise an error if the template prints null or NaN, for example because a method returned None."""
    if value is None or is_nan(value):
        raise jinja2.UndefinedError(f"a rendered value is {'null' if value is None else 'NaN'}")
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(value, _Missing):
        str(value)  # raises an error: null is allowed inside a value, but not as the whole value
    # As in chat templates, HTML is not escaped; Jinja2's own filter would escape it.
    layout = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return to_json(_with_nulls(value), ensure_ascii=ensure_ascii, **layout)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, jinja2.Undefined) else value


def _environment() -> jinja2.Environment:
    # Rows are untrusted: the sandbox prevents access to attributes of values.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=_Missing, finalize=_check_printed, keep_trailing_newline=True
    )
    environment.filters["tojson"] = _tojson
    environment.tests["none"] = lambda value: value is None or isinstance(value, _Missing)
    return environment


_ENVIRONMENT = _environment()


def _needed(node: nodes.Node) -> Iterator[str]:
    """Yield names that every rendering reads. Names in branches or tests, or with a default, are left out."""
    match node:
        case nodes.Name():
            yield node.name
        case nodes.Template() | nodes.Block() | nodes.FilterBlock():
            yield from _needed_by_all(node.body)
        case nodes.Output() | nodes.Concat():
            yield from _needed_by_all(node.nodes)
        case nodes.For():
            yield from _needed(node.iter)
        case nodes.If():
            yield from _needed_if_tested(node.test)
        case nodes.Filter(name="default" | "d") | nodes.And() | nodes.Or() | nodes.Not():
            yield from _needed_if_tested(node)
        case nodes.Filter(node=nodes.Expr() as value):
            yield from _needed(value)
        case nodes.Getattr() | nodes.Getitem() | nodes.Call() | nodes.UnaryExpr():
            yield from _needed(node.node)
        case nodes.BinExpr():
            yield from _needed_by_all((node.left, node.right))
        case _:
            yield from _needed_if_tested(node)


def _needed_if_tested(node: nodes.Node) -> Iterator[str]:
    """Like `_needed`, for an expression that is tested or has a default, so that its own value may be missing."""
    match node:
        case nodes.Filter(name="default" | "d", node=nodes.Expr() as value):
            yield from _needed_if_tested(value)
        case nodes.Not() | nodes.Test():
            yield from _needed_if_tested(node.node)
        case nodes.And() | nodes.Or():
            yield from _needed_if_tested(node.left)  # the right side might not be evaluated
        case nodes.CondExpr():
            yield from _needed_if_tested(node.test)
        case nodes.Compare():
            yield from _needed_if_tested(node.expr)
        case nodes.Filter() | nodes.Getattr() | nodes.Getitem() | nodes.Call():
            yield from _needed(node)


def _needed_by_all(parts: Iterable[nodes.Node]) -> Iterator[str]:
    for part in parts:
        yield from _needed(part)
