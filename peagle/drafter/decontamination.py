"""Remove evaluation problems from training data, by word n-gram overlap.

A text is contaminated if it shares `NUM_WORDS` consecutive words with a reference. Case, punctuation and layout are
ignored, so that reformatted copies are found too. References are HumanEval or the user's evaluation files.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from peagle.corpus.rows import Row
from peagle.corpus.scan import find_files, read_all
from peagle.errors import ConfigError, InputError
from peagle.humaneval import HUMANEVAL, read_humaneval
from peagle.requests.messages import parse_messages

T = TypeVar("T")

NUM_WORDS = 10  # of an n-gram


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Generic[T]):
    """An item that overlaps an evaluation set, with the shared words."""

    item: T
    overlap: str
    evaluation_set: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decontaminated(Generic[T]):
    kept: list[T]
    dropped: list[Dropped[T]]


class NgramIndex:
    """The word n-grams of the references. References shorter than an n-gram are ignored (none in HumanEval)."""

    def __init__(self) -> None:
        self._set_of_ngram: dict[tuple[str, ...], str] = {}  # n-gram -> name of the evaluation set

    def add(self, references: Iterable[str], evaluation_set: str) -> int:
        """Add a set and return the number of its n-grams. Shared n-grams belong to the set that was added first."""
        ngrams = {ngram for reference in references for ngram in self._ngrams(reference)}
        self._set_of_ngram = dict.fromkeys(ngrams, evaluation_set) | self._set_of_ngram
        return len(ngrams)

    def overlap(self, text: str) -> str | None:
        """Return the first n-gram that `text` shares with a reference, or None."""
        for ngram in self._ngrams(text):
            if ngram in self._set_of_ngram:
                return " ".join(ngram)
        return None

    def evaluation_set_of(self, overlap: str) -> str:
        return self._set_of_ngram[tuple(overlap.split())]

    def _ngrams(self, text: str) -> Iterable[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return zip(*(words[i:] for i in range(NUM_WORDS)), strict=False)


def decontaminate(items: Sequence[T], index: NgramIndex, *, text: Callable[[T], str]) -> Decontaminated[T]:
    """Separate the items that overlap an evaluation set. `text` returns the text of an item."""
    kept: list[T] = []
    dropped: list[Dropped[T]] = []
    for item in items:
        overlap = index.overlap(text(item))
        if overlap is None:
            kept.append(item)
        else:
            dropped.append(Dropped(item=item, overlap=overlap, evaluation_set=index.evaluation_set_of(overlap)))
    return Decontaminated(kept=kept, dropped=dropped)


def report_dropped(dropped: Iterable[Dropped[Row]], say: Callable[[str], None]) -> None:
    for drop in dropped:
        say(f"  overlaps {drop.evaluation_set}: {drop.item.get('id', '?')}: {drop.overlap!r}")


def humaneval_references() -> list[str]:
    return [text for problem in read_humaneval() for text in (problem["prompt"], problem["canonical_solution"])]


NONE = "none"
NAMED_SETS = (HUMANEVAL, NONE)  # other values of --exclude are files
DEFAULT_SETS = (HUMANEVAL,)


def build_index(evaluation_sets: Sequence[str]) -> NgramIndex:
    if NONE in evaluation_sets and len(evaluation_sets) > 1:
        raise ConfigError(
            f"--exclude {' and '.join(evaluation_sets)} contradict each other", hint=f"remove {NONE} or the others"
        )
    index = NgramIndex()
    for name in evaluation_sets:
        if name != NONE and not index.add(_references(name), name):
            raise InputError(
                f"--exclude {name}: an overlap is {NUM_WORDS} consecutive words, but all texts of the set are shorter",
                hint="use a file that contains the prompts themselves",
            )
    return index


def _references(name: str) -> list[str]:
    if name == HUMANEVAL:
        return humaneval_references()
    try:
        files = find_files(name)
    except InputError as error:
        raise ConfigError(
            f"--exclude {name}: unknown evaluation set: {error.message}",
            hint=f"use {HUMANEVAL}, {NONE}, or a corpus in a format that `peagle generate` reads",
        ) from error
    texts: list[str] = []
    for row in read_all(files):
        messages = parse_messages(row.get("messages"))  # unparsed JSON text would contain escaped line breaks
        texts += _texts(row if isinstance(messages, str) else {**row, "messages": messages})
    return texts


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a nested value, except system messages, which training data may share."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and value.get("role") != "system":
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
