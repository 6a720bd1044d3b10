import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.drafter.data import Sample, build_samples, id_of, read_responses, row_text
from peagle.errors import InputError
from peagle.storage import Place, atomic_file, write_atomic


class Tokenizer:
    """One token a character; the template is plain."""

    eos_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("no role 'tool'")
        return "".join("<" + m["content"] + ">" for m in messages)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


ROW = {"id": "a", "prompt": "hi", "response": "yo", "finish_reason": "stop"}


def _one(**changes: Any) -> Sample | str:
    samples, rejected = build_samples([{**ROW, **changes}], Tokenizer(), max_tokens=12)
    return samples[0] if samples else rejected[0].reason


def test_the_loss_is_on_the_response_and_its_end_of_turn() -> None:
    sample = _one()
    assert isinstance(sample, Sample)
    assert sample.token_ids == (*map(ord, "<hi>yo"), 0)
    assert sample.loss_mask == [False] * 4 + [True] * 3


def test_a_response_cut_by_its_length_has_no_end_of_turn() -> None:
    sample = _one(finish_reason="length")
    assert isinstance(sample, Sample)
    assert sample.token_ids == tuple(map(ord, "<hi>yo"))


def test_messages_win_over_the_prompt() -> None:
    sample = _one(messages=[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])
    assert isinstance(sample, Sample)
    assert sample.num_prompt_tokens == len("<x><y>")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
        '[{"role": "user", "content": "x\\ny"}]',
    ],
)
def test_contents_in_parts_and_messages_as_json_text_are_taken_as_in_bulk_runs(messages: Any) -> None:
    sample = _one(messages=messages)
    assert isinstance(sample, Sample)
    assert sample.token_ids == (*map(ord, "<x\ny>yo"), 0)
    assert row_text({"messages": messages, "response": "r"}, "prompt") == "x\ny\n\nr"


def test_long_documents_are_cut() -> None:
    sample = _one(response="y" * 50)
    assert isinstance(sample, Sample)
    assert len(sample.token_ids) == 12


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response": ""}, "no response"),
        ({"response": None}, "no response"),
        ({"response": 5}, "its response is no text but int"),
        ({"messages": "hi"}, "column 'messages' holds a str, not a list of messages"),
        ({"messages": ["hi"]}, "column 'messages', message 0: it needs a role and a content, both text"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": None}]},
            "column 'messages', message 1: it needs a role and a content, both text",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template refuses the row: no role 'tool'"),
        ({"prompt": None}, "neither 'messages' nor a text in 'prompt'"),
        ({"prompt": "x" * 10}, "the prompt alone has 12 tokens, the limit is 12"),
    ],
)
def test_rows_without_a_sample_say_why(changes: dict[str, Any], reason: str) -> None:
    assert _one(**changes) == reason


def test_rejected_rows_are_named() -> None:
    _, rejected = build_samples([ROW, {"prompt": "p", "response": ""}], Tokenizer())
    assert [r.id for r in rejected] == ["1"]


def test_reads_a_run_directory_and_files_alike_on_a_disk_and_in_s3(root: Place) -> None:
    (root / "data").mkdir(parents=True)
    for name, row_id in (("unit-00001.parquet", "a"), ("unit-00000.parquet", "b")):
        with atomic_file(root / "data" / name) as file:
            pq.write_table(pa.Table.from_pylist([{**ROW, "id": row_id}]), file)
    write_atomic(root / "rows.jsonl", json.dumps(ROW).encode() + b"\n\n")
    assert [row["id"] for row in read_responses(str(root))] == ["b", "a"]
    assert list(read_responses(str(root / "rows.jsonl"))) == [ROW]
    with pytest.raises(InputError, match="nothing: no prompts or responses there"):
        list(read_responses(str(root / "nothing")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"response": "x"}\n{broken', "rows.jsonl line 2: not valid JSON"),
        ("rows.jsonl", "[1]", "rows.jsonl line 1: a JSON list, not an object"),
        ("rows.jsonl", '{"respones": "x"}', "no column 'response'"),
        ("rows.docx", "x", "unknown format '.docx'"),
        ("rows.parquet", "text", "rows.parquet: not readable as Parquet"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        list(read_responses(tmp_path / name))


def test_another_encoding_is_refused_with_the_line_and_a_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"response": "x"}\n{"response": "caf\xe9"}\n')
    rows = read_responses(file)
    assert next(rows) == {"response": "x"}
    with pytest.raises(InputError, match=r"rows\.jsonl line 2: not valid JSON: 'utf-8' codec"):
        next(rows)


def test_a_file_that_is_gone_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl: no prompts or responses there: .*no such file"):
        list(read_responses(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"response,prompt\nx,p\n"),
        ("a.ndjson", b'{"response": "x", "prompt": "p"}\n'),
        ("a.jsonl.gz", gzip.compress(b'{"response": "x", "prompt": "p"}\n', mtime=0)),
    ],
)
def test_every_corpus_of_a_bulk_run_gives_responses(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden.jsonl").write_bytes(content)
    for source in (tmp_path / name, tmp_path, f"{tmp_path}/*"):
        assert list(read_responses(source)) == [{"response": "x", "prompt": "p"}]


def test_what_a_row_says_is_read_of_messages_alone() -> None:
    assert row_text({"messages": "hi", "prompt": "p", "response": "r"}, "prompt") == "\np\nr"
    assert row_text({"messages": [{"role": "user", "content": "x"}], "response": "r"}, "prompt") == "x\n\nr"


def test_a_folder_without_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompts or responses there"):
        list(read_responses(tmp_path))


def test_a_null_is_no_word_of_a_rows_text_and_no_id():
    assert row_text({"prompt": None, "response": "r"}, "prompt").split() == ["r"]
    assert [id_of({"id": None}, 3), id_of({}, 3), id_of({"id": 0}, 3)] == ["3", "3", "0"]
