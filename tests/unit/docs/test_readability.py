"""Pages have short sentences and paragraphs, existing pictures, a place in the navigation, and few words."""

import re
import tomllib
from itertools import chain
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[3]
MAX_WORDS_PER_SENTENCE = 18  # on average
MAX_WORDS_PER_PARAGRAPH = 90
MAX_WORDS = 25_000
GUIDES = ("bulk", "online", "deploy", "cost", "drafters", "planning", "benchmarks")
FOLDERS = ("tutorials", "how-to", "explanation")
READER_PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in GUIDES),
    *sorted(chain.from_iterable((ROOT / "docs" / folder).glob("*.md") for folder in FOLDERS)),
]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(text):
    """Return the paragraphs and list items of a page, without code, tables, headings, pictures and HTML."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"^ *(\||#|<|:::).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *([-*]|\d+\.) +", "\n\n", text, flags=re.MULTILINE)
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip()]


def sentences(text):
    parts = [part for block in blocks(text) for part in re.split(r"(?<=[.!?])\s+", block)]
    return [part for part in parts if re.search(r"\w", part)]


def num_words(text):
    return len(text.split())


PAGE = """\
# Title

A `b c`. D!
- [e](f.md).
  1. G
     h.

| i |
|---|
![j](k.png)
```
l.
```
<img>
"""


def test_page_is_split_into_blocks_and_sentences():
    assert blocks(PAGE) == ["A code. D!", "e.", "G h."]
    assert sentences(PAGE) == ["A code.", "D!", "e.", "G h."]


@pytest.mark.parametrize("page", READER_PAGES, ids=name_of)
def test_sentences_and_paragraphs_are_short(page):
    text = page.read_text()
    average = mean(map(num_words, sentences(text)))
    assert average <= MAX_WORDS_PER_SENTENCE, f"{average:.1f} words per sentence"
    long_blocks = [block for block in blocks(text) if num_words(block) > MAX_WORDS_PER_PARAGRAPH]
    lengths = [num_words(block) for block in long_blocks]
    assert not long_blocks, f"paragraphs of {lengths} words; the first: {long_blocks[0][:80]} ..."


@pytest.mark.parametrize("page", sorted({*READER_PAGES, *(ROOT / "docs").rglob("*.md")}), ids=name_of)
def test_pictures_exist(page):
    matches = re.findall(r'!\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img [^>]*src="([^"]+)"', page.read_text())
    missing = [link for pair in matches for link in pair if link and not (page.parent / link).is_file()]
    assert not missing


def pages_of(entries):
    """Yield the pages in entries of the navigation."""
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(target, str):
                yield target
            else:
                yield from pages_of(target)


def test_each_page_is_in_the_navigation():
    nav = list(pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert len(nav) == len(set(nav)), "a page is listed twice"
    assert {page for page in nav if not (ROOT / page).exists()} == set()
    folders = [page for page in nav if page.endswith("/")]
    pages = {name_of(page) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages - set(nav) if not page.startswith(tuple(folders))} == set()


def test_pages_have_few_words():
    total = sum(num_words(page.read_text()) for page in {*READER_PAGES, *DECISIONS})
    assert total <= MAX_WORDS, f"{total:,} words outside the reference; move histories and measurements to benchmarks/"
