import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.bench.config import EvaluateConfig
from peagle.bench.prompts import Dataset, build_dataset, read_dataset
from peagle.engine.fake import ByteTokenizer
from peagle.errors import InputError
from peagle.storage import place, write_atomic


def load(max_model_len: int = 4096, **keys: Any) -> Dataset:
    config = EvaluateConfig(**keys)
    rows = read_dataset(config)
    return build_dataset(config, rows, ByteTokenizer(), max_model_len, category_column=config.category_column)


def test_humaneval_is_asked_for_as_by_the_demo() -> None:
    dataset = load(limit=3)
    text = bytes(dataset.prompts[0].token_ids).decode()
    assert text.startswith("user: Complete the following Python function. Answer with the code only.")
    assert "def has_close_elements" in text
    assert (dataset.name, len(dataset.prompts), dataset.prompts[0].category) == ("humaneval", 3, None)


def test_humaneval_with_a_template_of_ones_own() -> None:
    assert (
        bytes(load(limit=1, prompt_template="{{ task_id }}").prompts[0].token_ids) == b"user: HumanEval/0\nassistant: "
    )


def test_jsonl_and_parquet_give_the_same_prompts(write_jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"prompt": "a", "category": "x"}, {"prompt": "b", "category": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_jsonl, from_parquet = load(dataset=str(write_jsonl(rows))), load(dataset=str(tmp_path / "rows.parquet"))
    assert from_jsonl.prompts == from_parquet.prompts
    assert [prompt.category for prompt in from_jsonl.prompts] == ["x", None]
    assert from_jsonl.fingerprint == from_parquet.fingerprint


@pytest.mark.usefixtures("s3")
def test_data_in_s3_is_read() -> None:
    write_atomic(place("s3://bucket/rows.jsonl"), b'{"prompt": "a"}\n')
    dataset = load(dataset="s3://bucket/rows.jsonl")
    assert (dataset.name, len(dataset.prompts)) == ("rows.jsonl", 1)


def test_the_category_column_can_be_named_and_holds_anything(write_jsonl: Callable[..., Path]) -> None:
    file = write_jsonl([{"prompt": "a", "level": 3}])
    assert load(dataset=str(file), category_column="level").prompts[0].category == "3"


def test_rows_without_a_prompt_are_counted_by_reason(write_jsonl: Callable[..., Path]) -> None:
    file = write_jsonl([{"prompt": "a"}, {"prompt": None}, {"prompt": "b" * 50}])
    dataset = load(dataset=str(file), max_model_len=30)
    assert len(dataset.prompts) == 1
    assert dataset.rejected == {"invalid_prompt": 1, "prompt_too_long": 1}


def test_other_rows_or_a_limit_are_another_fingerprint(write_jsonl: Callable[..., Path]) -> None:
    one, two = [str(write_jsonl([{"prompt": "a"}, {"prompt": p}], f"{p}.jsonl")) for p in "bc"]
    loaded = [load(dataset=one), load(dataset=two), load(dataset=one, limit=1)]
    assert len({dataset.fingerprint for dataset in loaded}) == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([""], "has no rows"),
        ([{"text": "a"}], "no column 'prompt' or 'messages'"),
        ([{"prompt": 3}], "no row yields a prompt; the first: column 'prompt' must be text, not int"),
        (["{"], "not valid JSON"),
    ],
)
def test_data_that_cannot_be_used(lines: list[Any], message: str, write_jsonl: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=message):
        load(dataset=str(write_jsonl(lines)))


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("name", ["nothing.jsonl", "s3://bucket/rows.jsonl", "gs://bucket/rows.jsonl", "humanevil"])
def test_data_that_is_not_there(name: str) -> None:
    with pytest.raises(InputError, match=r"(no such file|only local files)(.|\n)*humaneval"):
        load(dataset=name)


def test_a_batch_and_a_table_are_asked_as_a_bulk_run_asks_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,category\nab,x\n")
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "ab"}]}}  # fmt: skip
    text = {**chat, "custom_id": "b", "url": "/v1/completions", "body": {"prompt": "ab"}}
    unknown = {**chat, "custom_id": "c", "body": {**chat["body"], "tempreature": 1}}
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(request) + "\n" for request in (chat, text, unknown)))
    table, batch = load(dataset=str(tmp_path / "a.csv")), load(dataset=str(tmp_path / "b.jsonl"))
    assert batch.prompts[0].token_ids == table.prompts[0].token_ids
    assert bytes(batch.prompts[1].token_ids) == b"ab"
    assert batch.rejected == {"invalid": 1}
