import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.drafter.config import TrainConfig
from peagle.drafter.decontamination import humaneval_references
from peagle.drafter.evaluation_sets import index_of
from peagle.errors import ConfigError

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
        (["humanevil"], "humanevil: no such evaluation set"),
        (["s3://bucket/held.jsonl"], "no such evaluation set"),
    ],
)
def test_sets_that_cannot_be_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        index_of(names)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "the file is empty"), ([{"prompt": "too short to be found"}], "no text in it has 10 words")],
)
def test_a_file_that_would_keep_nothing_out_is_refused(
    rows: list[dict[str, str]], message: str, write_jsonl: Write
) -> None:
    with pytest.raises(ConfigError, match=message):
        index_of([str(write_jsonl(rows))])
