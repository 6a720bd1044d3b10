import ast
from pathlib import Path

import pytest

from peagle.drafter.prompts import FORMS, Snippet, folder_snippets

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


def test_a_prompt_carries_what_is_to_be_done() -> None:
    snippet = Snippet(module="m", name="area", arguments="a, b", returns="", docstring="Multiply both sides.")
    for form in FORMS:
        assert "Multiply both sides." in form.put(snippet)
        assert "area" in form.put(snippet)


def test_the_standard_library_is_read() -> None:
    json_module = folder_snippets(Path(ast.__file__).parent / "json")
    assert {"raw_decode", "iterencode"} <= {snippet.name for snippet in json_module}
