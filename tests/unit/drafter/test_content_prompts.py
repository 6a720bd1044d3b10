import pytest

from peagle.drafter.prompts import MAX_PASSAGE_CHARS, PASSAGES_PER_DOCUMENT, Content, content_materials, prose

SENTENCES = "This is a sentence of several plain words. " * 8


@pytest.mark.parametrize(
    "markup",
    ["See https://example.com for more. ", "Call `this` and ``that``. ", "![a badge] ", "| a | b | ", ">>> 1 + 1 "],
)
def test_markup_code_and_links_are_no_prose(markup: str) -> None:
    assert prose(SENTENCES) == [SENTENCES.strip()]
    assert prose(SENTENCES + markup) == []


def test_a_document_gives_few_passages_of_a_fit_length() -> None:
    assert len(prose("\n\n".join([SENTENCES] * 9))) == PASSAGES_PER_DOCUMENT
    assert prose("Too short. It is.") == prose(SENTENCES * 9) == prose("words without an end " * 20) == []


def test_braces_of_a_text_are_its_own() -> None:
    content = Content(group="topic", module="m", name="sets {a} and {text}", text="", held_out=False)
    asked = [content.wording(0, index) for index in range(content.num_wordings)]
    assert all("sets {a} and {text}" in text for _, text in asked)
    assert {category for category, _ in asked} == {"explanation", "writing", "ideas"}


def test_the_materials_are_the_same_each_time_and_of_every_group() -> None:
    materials = content_materials(held_out=False)
    assert materials == content_materials(held_out=False)
    assert {material.group for material in materials} == {"prose", "topic", "table", "sum"}
    assert max(len(material.text) for material in materials) <= MAX_PASSAGE_CHARS
