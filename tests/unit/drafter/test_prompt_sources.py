import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.drafter.config import TrainConfig
from peagle.drafter.decontamination import humaneval_references
from peagle.drafter.prompt_sources import read_prompts, read_responses, share_out
from peagle.drafter.prompts import FORMS, generate_prompts, source_materials
from peagle.errors import InputError
from peagle.storage import Place, atomic_file, write_atomic

Write = Callable[..., Path]
ROW = {"id": "a", "prompt": "hi", "response": "yo", "finish_reason": "stop"}


def _problem() -> str:
    return humaneval_references()[0]


def _read(*sources: Path | str, said: list[str] | None = None, **changes: Any) -> list[dict[str, Any]]:
    config = TrainConfig(prompts=[Path(source) for source in sources], output=Path("unused"), **changes)
    return read_prompts(config, (said if said is not None else []).append)


def test_files_and_runs_give_what_was_asked_and_no_response(write_jsonl: Write, tmp_path: Path) -> None:
    rows = write_jsonl([{"id": 7, "prompt": "a", "response": "x", "finish_reason": "stop"}, {"prompt": "b"}])
    (tmp_path / "run" / "data").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist([{"id": "r", "prompt": "c"}]), tmp_path / "run" / "data" / "unit-00000000.parquet"
    )
    expected = [{"id": "7", "prompt": "a"}, {"id": "1", "prompt": "b"}, {"id": "r", "prompt": "c"}]
    assert _read(rows, tmp_path / "run") == expected
    assert _read(rows, tmp_path / "run", limit=2) == [expected[0], expected[2]]


def test_a_limit_is_shared_out_among_sources_and_what_each_gives_is_told(write_jsonl: Write) -> None:
    mine = write_jsonl([{"id": f"mine-{number}", "prompt": "a"} for number in range(50)])
    all_of_json = len(source_materials("package:json")) * len(FORMS)
    for limit, of_json, of_mine in ((40, 20, 20), (all_of_json + 49, all_of_json - 1, 50)):
        said: list[str] = []
        ids = [row["id"] for row in _read("package:json", mine, limit=limit, exclude="none", said=said)]
        assert ids[of_json:] == [f"mine-{number}" for number in range(of_mine)]
        assert said[1:] == [f"  {of_json} from package:json", f"  {of_mine} from {mine}"]


def test_all_is_taken_where_the_limit_is_more_than_there_is(write_jsonl: Write) -> None:
    said: list[str] = []
    all_of_json = len(source_materials("package:json")) * len(FORMS)
    assert len(_read("package:json", limit=5000, exclude="none", said=said)) == all_of_json
    assert said[1:] == ["  there are fewer prompts than --limit 5,000"]


@pytest.mark.parametrize(
    ("limit", "held", "shares"),
    [(None, [3, 0, 5], [3, 0, 5]), (7, [9, 9], [3, 4]), (7, [9, 2, 9], [2, 2, 3]), (9, [2, 3], [2, 3]), (1, [5], [1])],
)
def test_shares_are_as_even_as_the_sources_allow(limit: int | None, held: list[int], shares: list[int]) -> None:
    assert share_out(limit, held) == shares


@pytest.mark.parametrize(
    "column", ["id", "response", "model", "input_response", "sampling", "prompt", "__peagle_error"]
)
def test_a_prompt_column_may_have_the_name_of_one_of_a_runs(write_jsonl: Write, column: str) -> None:
    assert _read(write_jsonl([{column: "a"}]), prompt_column=column) == [
        {"id": "a" if column == "id" else "0", "prompt": "a"}
    ]


def test_a_corpus_of_text_and_a_batch_give_what_a_bulk_run_would_ask(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [row["prompt"] for row in _read(tmp_path / "a.txt")] == ["one", "two"]
    chat = [{"role": "user", "content": "hi"}]
    envelope = {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": chat}}
    text = {**envelope, "url": "/v1/completions", "body": {"prompt": "go on"}}
    requests = [{"custom_id": "a", **envelope}, {"custom_id": "b", **text}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert _read(tmp_path / "b.jsonl") == [
        {"id": "a", "messages": chat},
        {"id": "b", "messages": [{"role": "user", "content": "go on"}]},
    ]


def test_where_one_row_has_messages_all_have(write_jsonl: Write) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = _read(write_jsonl([{"text": "a"}, {"messages": chat}]), prompt_column="text")
    assert rows == [{"id": "0", "messages": [{"role": "user", "content": "a"}]}, {"id": "1", "messages": chat}]


def test_evaluation_problems_are_left_out_and_told(write_jsonl: Write) -> None:
    problem = humaneval_references()[0]
    leaks = [{"id": "plain", "prompt": problem}, {"id": "chat", "messages": [{"role": "user", "content": problem}]}]
    said: list[str] = []
    rows = _read(write_jsonl([{"id": "fine", "prompt": "a"}, *leaks]), said=said)
    assert [row["id"] for row in rows] == ["fine"]
    assert said[0] == "1 prompts, 2 dropped for overlap"
    assert [sentence.split(":")[1] for sentence in said[1:]] == [" plain", " chat"]
    assert len(_read(write_jsonl(leaks), exclude="none")) == 2
    with pytest.raises(InputError, match="no prompts left; all 2 overlap humaneval"):
        _read(write_jsonl(leaks))


def test_evaluation_problems_are_found_in_whatever_form_messages_have(write_jsonl: Write) -> None:
    problem = humaneval_references()[0]
    as_text = json.dumps([{"role": "user", "content": problem}])
    in_parts = [{"role": "user", "content": [{"type": "text", "text": problem}]}]
    rows = _read(write_jsonl([{"id": "fine", "prompt": "a"}, {"messages": as_text}, {"messages": in_parts}]))
    assert [row["id"] for row in rows] == ["fine"]


def test_a_file_of_ones_own_is_kept_out_beside_humaneval_and_named(write_jsonl: Write) -> None:
    held = write_jsonl([{"task": "Say in one sentence why the sky looks blue at noon and red at dusk."}], "held.jsonl")
    leak = "say in one sentence why the SKY looks blue at noon: and then why the sea does"
    rows = write_jsonl([{"id": "fine", "prompt": "a"}, {"id": "own", "prompt": leak}, {"prompt": _problem()}])
    said: list[str] = []
    assert [row["id"] for row in _read(rows, exclude=["humaneval", str(held)], said=said)] == ["fine"]
    assert said[1].startswith(f"  overlaps {held}: own: 'say in one sentence why")
    assert said[2].startswith("  overlaps humaneval: 2: ")
    assert [row["id"] for row in _read(rows, exclude=str(held))] == ["fine", "2"]


def test_code_is_a_source() -> None:
    rows = _read("package:json", limit=20, exclude="none")
    prompts = generate_prompts(source_materials("package:json"), source="package:json", limit=20)
    assert rows == [{"id": p.id, "prompt": p.prompt} for p in prompts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("\n", "has no rows"),
        ('{"promt": "x"}', "neither a column 'prompt' nor 'messages'"),
        ("{", "not valid JSON"),
    ],
)
def test_a_source_without_prompts_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        _read(tmp_path / "p.jsonl")


def test_reads_a_run_directory_and_files_alike_on_a_disk_and_in_s3(root: Place) -> None:
    (root / "data").mkdir(parents=True)
    for name, row_id in (("unit-00000001.parquet", "a"), ("unit-00000000.parquet", "b"), ("unit-copy.parquet", "c")):
        with atomic_file(root / "data" / name) as file:
            pq.write_table(pa.Table.from_pylist([{**ROW, "id": row_id}]), file)
    write_atomic(root / "rows.jsonl", json.dumps(ROW).encode() + b"\n\n")
    assert [row["id"] for row in read_responses(str(root))] == ["b", "a"]
    assert list(read_responses(str(root / "rows.jsonl"))) == [ROW]
    with pytest.raises(InputError, match="nothing: has no prompts or responses"):
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
    with pytest.raises(InputError, match=r"rows\.jsonl: has no prompts or responses: .*no such file"):
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


def test_a_folder_without_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no prompts or responses"):
        list(read_responses(tmp_path))
