from itertools import islice

import pytest

from peagle.drafter.prompts import FORMS, Snippet, content_materials, generate_prompts, num_available, source_materials
from peagle.errors import ConfigError

SNIPPETS = [
    Snippet(module="m", name=name, arguments="", returns="", docstring=f"Do {{this}} and {name}.")
    for name in ("area", "scale")
]


def test_order_depends_on_the_seed_alone() -> None:
    assert list(generate_prompts(SNIPPETS, seed=1)) == list(generate_prompts(SNIPPETS, seed=1))
    ids = [{p.id for p in islice(generate_prompts(SNIPPETS, seed=seed), 2)} for seed in range(8)]
    assert any(other != ids[0] for other in ids)


def test_every_snippet_before_any_again_and_never_the_same_wording() -> None:
    prompts = list(generate_prompts(SNIPPETS))
    assert len(prompts) == len(SNIPPETS) * len(FORMS)
    assert len({p.id for p in prompts}) == len(prompts)
    for start in range(0, len(prompts), len(SNIPPETS)):
        assert {p.name for p in prompts[start : start + len(SNIPPETS)]} == {"area", "scale"}


def test_limit() -> None:
    assert len(list(generate_prompts(SNIPPETS[:1], limit=3))) == 3
    with pytest.raises(ConfigError, match="has only 9 prompts"):
        list(generate_prompts(SNIPPETS[:1], limit=10))


@pytest.mark.parametrize("source", ["package:json", "package:networkx"])
def test_an_installed_package_is_a_source(source: str) -> None:
    materials = source_materials(source)
    assert {"raw_decode", "shortest_path"} & {material.name for material in materials}
    name = source.partition(":")[2]
    assert all(prompt.id.startswith(f"{name}-") for prompt in generate_prompts(materials, source=source, limit=3))


@pytest.mark.parametrize("source", ["stdlibs", "package:", "package:no_such_package", "package:this", "package:a/b"])
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="unknown source of prompts"):
        source_materials(source)


def test_content_is_of_many_kinds_and_what_is_held_out_is_not_trained_on() -> None:
    trained, held_out = (source_materials(source) for source in ("content", "content:held-out"))
    kinds = [
        {prompt.category for prompt in generate_prompts(materials, source="content")}
        for materials in (trained, held_out)
    ]
    assert (len(kinds[0]) >= 9, len(kinds[1]) >= 6, kinds[0] & kinds[1]) == (True, True, set())
    assert {material.text for material in trained}.isdisjoint(material.text for material in held_out)


def test_materials_with_fewer_wordings_are_asked_about_less_often() -> None:
    materials = content_materials(held_out=True)
    prompts = list(generate_prompts(materials, source="content:held-out"))
    assert len(prompts) == num_available(materials) == sum(material.num_wordings for material in materials)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert {prompt.category for prompt in prompts[: len(materials)]} == {prompt.category for prompt in prompts}
