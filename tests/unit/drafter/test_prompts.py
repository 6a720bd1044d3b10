import ast
from itertools import islice
from pathlib import Path

import pytest

from peagle.drafter.prompts import FORMS, Snippet, folder_snippets, generate_prompts, source_snippets
from peagle.errors import ConfigError

MODULE = '''
import os

raise RuntimeError("a module that is imported does this")

def area(width: int, height: int = 2) -> int:
    """The area of a rectangle of integer sides.

    >>> area(2, 3)
    6
    """
    return width * height

class Shape:
    def scale(self, factor):
        """Scale every side by the given factor."""

    def bare(self):
        return None

    @classmethod
    def unit(cls):
        """short"""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "shapes.py").write_text(MODULE)
    (tmp_path / "copy.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def :")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text(MODULE.replace("area", "elsewhere"))
    return tmp_path


def test_documented_functions_once_each_without_importing(library: Path) -> None:
    snippets = folder_snippets(library)
    assert [(s.module, s.name, s.arguments, s.returns) for s in snippets] == [
        ("copy", "area", "width: int, height: int=2", "int"),
        ("copy", "scale", "factor", ""),
    ]


def test_the_code_of_a_snippet_parses_to_what_it_came_from(library: Path) -> None:
    for snippet in folder_snippets(library):
        function = ast.parse(snippet.code).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert function.name == snippet.name
        assert ast.get_docstring(function) == snippet.docstring


def test_order_depends_on_the_seed_alone(library: Path) -> None:
    snippets = folder_snippets(library)
    assert list(generate_prompts(snippets, seed=1)) == list(generate_prompts(snippets, seed=1))
    ids = [{p.id for p in islice(generate_prompts(snippets, seed=seed), 2)} for seed in range(8)]
    assert any(other != ids[0] for other in ids)


def test_every_snippet_before_any_again_and_never_the_same_wording(library: Path) -> None:
    snippets = folder_snippets(library)
    prompts = list(generate_prompts(snippets))
    assert len(prompts) == len(snippets) * len(FORMS)
    assert len({p.id for p in prompts}) == len(prompts)
    for start in range(0, len(prompts), len(snippets)):
        assert {p.name for p in prompts[start : start + len(snippets)]} == {"area", "scale"}


def test_limit() -> None:
    snippets = [Snippet(module="m", name="f", arguments="", returns="", docstring="Do {this} and that.")]
    assert len(list(generate_prompts(snippets, limit=3))) == 3
    with pytest.raises(ConfigError, match="holds 9 prompts"):
        list(generate_prompts(snippets, limit=10))


def test_a_prompt_carries_what_is_to_be_done() -> None:
    snippet = Snippet(module="m", name="area", arguments="a, b", returns="", docstring="Multiply both sides.")
    for form in FORMS:
        assert "Multiply both sides." in form.put(snippet)
        assert "area" in form.put(snippet)


def test_the_standard_library_is_read() -> None:
    json_module = folder_snippets(Path(ast.__file__).parent / "json")
    assert {"raw_decode", "iterencode"} <= {snippet.name for snippet in json_module}


@pytest.mark.parametrize("source", ["package:json", "package:networkx"])
def test_an_installed_package_is_a_source(source: str) -> None:
    snippets = source_snippets(source)
    assert {"raw_decode", "shortest_path"} & {snippet.name for snippet in snippets}
    name = source.partition(":")[2]
    assert all(prompt.id.startswith(f"{name}-") for prompt in generate_prompts(snippets, source=source, limit=3))


@pytest.mark.parametrize("source", ["stdlibs", "package:", "package:no_such_package", "package:this", "package:a/b"])
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="no such source of prompts"):
        source_snippets(source)
