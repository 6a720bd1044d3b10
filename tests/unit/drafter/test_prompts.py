import ast
import json
from functools import partial

import pytest

from peagle.drafter.prompts import (
    CODE_WORDINGS,
    Content,
    Snippet,
    content_materials,
    folder_snippets,
    generate_prompts,
    num_available,
    prose,
    source_materials,
    split_by_hash,
)
from peagle.errors import ConfigError

SNIPPETS = [
    Snippet(module="m", name=name, arguments="", returns="", docstring=f"Do {{this}} and {name}.")
    for name in ("area", "scale")
]


def test_every_snippet_occurs_before_any_repeats():
    prompts = list(generate_prompts(SNIPPETS))
    assert len(prompts) == len(SNIPPETS) * len(CODE_WORDINGS)
    assert len({p.id for p in prompts}) == len(prompts)
    for start in range(0, len(prompts), len(SNIPPETS)):
        assert {p.name for p in prompts[start : start + len(SNIPPETS)]} == {"area", "scale"}


@pytest.mark.parametrize("source", ["package:json", "package:networkx"])
def test_an_installed_package_is_a_source(source):
    materials = source_materials(source)
    function_of_each_package = {"raw_decode", "shortest_path"}
    assert function_of_each_package & {material.name for material in materials}
    name = source.partition(":")[2]
    assert all(prompt.id.startswith(f"{name}-") for prompt in generate_prompts(materials, source=source, limit=3))


@pytest.mark.parametrize("source", ["stdlibs", "package:", "package:no_such_package", "package:this", "package:a/b"])
def test_unknown_prompt_sources_are_refused(source):
    with pytest.raises(ConfigError, match="unknown source of prompts"):
        source_materials(source)


def test_held_out_content_is_disjoint():
    trained, held_out = (source_materials(source) for source in ("content", "content:held-out"))
    categories = [
        {prompt.category for prompt in generate_prompts(materials, source="content")}
        for materials in (trained, held_out)
    ]
    assert len(categories[0]) >= 9
    assert len(categories[1]) >= 6
    assert categories[0].isdisjoint(categories[1])
    assert {material.text for material in trained}.isdisjoint(material.text for material in held_out)


def test_all_wordings_of_all_materials_occur():
    materials = content_materials(held_out=True)
    prompts = list(generate_prompts(materials, source="content:held-out"))
    assert len(prompts) == num_available(materials) == sum(material.num_wordings for material in materials)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert {prompt.category for prompt in prompts[: len(materials)]} == {prompt.category for prompt in prompts}


MODULE = '''
import os

raise RuntimeError("this module was imported")

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
def library(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "shapes.py").write_text(MODULE)
    (tmp_path / "copy.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def :")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text(MODULE.replace("area", "elsewhere"))
    return tmp_path


def test_documented_functions_are_found_without_importing(library):
    snippets = folder_snippets(library)
    assert [(s.module, s.name, s.arguments, s.returns) for s in snippets] == [
        ("copy", "area", "width: int, height: int=2", "int"),
        ("copy", "scale", "factor", ""),
    ]


def test_snippet_code_parses(library):
    for snippet in folder_snippets(library):
        function = ast.parse(snippet.code).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert function.name == snippet.name
        assert ast.get_docstring(function) == snippet.docstring


SENTENCES = "This is a sentence of several plain words. " * 8


@pytest.mark.parametrize(
    "markup",
    ["See https://example.com for more. ", "Call `this` and ``that``. ", "![a badge] ", "| a | b | ", ">>> 1 + 1 "],
)
def test_prose_excludes_markup_code_and_links(markup):
    assert prose(SENTENCES) == [SENTENCES.strip()]
    assert prose(SENTENCES + markup) == []


def test_braces_in_text_are_kept():
    content = Content(group="topic", module="m", name="sets {a} and {text}", text="", held_out=False)
    wordings = [content.wording(0, index) for index in range(content.num_wordings)]
    assert all("sets {a} and {text}" in text for _, text in wordings)
    assert {category for category, _ in wordings} == {"explanation", "writing", "ideas"}


split_rows = partial(split_by_hash, text=lambda row: row["id"])


def test_split_depends_only_on_ids():
    rows = [{"id": str(number)} for number in range(400)]
    greedy, sampled = split_rows(rows, 0.25)
    assert 70 < len(sampled) < 130
    assert sorted(json.dumps(row) for row in greedy + sampled) == sorted(json.dumps(row) for row in rows)
    assert split_rows(rows[:100], 0.25)[1] == sampled[: len(split_rows(rows[:100], 0.25)[1])]
    assert split_rows(rows, 0.0) == (rows, [])
    assert split_rows(rows, 1.0) == ([], rows)
