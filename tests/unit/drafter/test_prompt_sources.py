import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.drafter.config import TrainConfig
from peagle.drafter.decontamination import humaneval_references
from peagle.drafter.prompt_sources import divide_evenly, read_prompts, read_responses
from peagle.drafter.prompts import CODE_WORDINGS, source_materials
from peagle.errors import InputError
from peagle.storage import atomic_file, write_atomic

ROW = {"id": "a", "prompt": "hi", "response": "yo", "finish_reason": "stop"}


def _read(*sources, messages=None, **changes):
    config = TrainConfig(prompts=[Path(source) for source in sources], output=Path("unused"), **changes)
    return read_prompts(config, (messages if messages is not None else []).append)


def test_prompts_are_read_from_files_and_runs(write_jsonl, tmp_path):
    rows = write_jsonl([{"id": 7, "prompt": "a", "response": "x", "finish_reason": "stop"}, {"prompt": "b"}])
    (tmp_path / "run" / "data").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist([{"id": "r", "prompt": "c"}]), tmp_path / "run" / "data" / "unit-00000000.parquet"
    )
    expected = [{"id": "7", "prompt": "a"}, {"id": "1", "prompt": "b"}, {"id": "r", "prompt": "c"}]
    assert _read(rows, tmp_path / "run") == expected
    assert _read(rows, tmp_path / "run", limit=2) == [expected[0], expected[2]]


def test_a_limit_is_divided_among_sources(write_jsonl):
    own_file = write_jsonl([{"id": f"mine-{number}", "prompt": "a"} for number in range(50)])
    num_available = len(source_materials("package:json")) * len(CODE_WORDINGS)
    for limit, num_json, num_mine in ((40, 20, 20), (num_available + 49, num_available - 1, 50)):
        messages: list[str] = []
        ids = [row["id"] for row in _read("package:json", own_file, limit=limit, exclude="none", messages=messages)]
        assert ids[num_json:] == [f"mine-{number}" for number in range(num_mine)]
        assert messages[1:] == [f"  {num_json} from package:json", f"  {num_mine} from {own_file}"]


@pytest.mark.parametrize(
    ("limit", "available", "shares"),
    [(None, [3, 0, 5], [3, 0, 5]), (7, [9, 9], [3, 4]), (7, [9, 2, 9], [2, 2, 3]), (9, [2, 3], [2, 3]), (1, [5], [1])],
)
def test_shares_are_as_even_as_possible(limit, available, shares):
    assert divide_evenly(limit, available) == shares


def test_prompts_are_read_from_text_files_and_batch_requests(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [row["prompt"] for row in _read(tmp_path / "a.txt")] == ["one", "two"]
    chat = [{"role": "user", "content": "hi"}]
    chat_request = {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": chat}}
    text_request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "go on"}}
    requests = [{"custom_id": "a", **chat_request}, {"custom_id": "b", **text_request}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert _read(tmp_path / "b.jsonl") == [
        {"id": "a", "messages": chat},
        {"id": "b", "messages": [{"role": "user", "content": "go on"}]},
    ]


def test_rows_may_mix_text_and_messages(write_jsonl):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = _read(write_jsonl([{"text": "a"}, {"messages": chat}]), prompt_column="text")
    assert rows == [{"id": "0", "messages": [{"role": "user", "content": "a"}]}, {"id": "1", "messages": chat}]


def test_evaluation_problems_are_dropped_and_reported(write_jsonl):
    problem = humaneval_references()[0]
    leaks = [{"id": "plain", "prompt": problem}, {"id": "chat", "messages": [{"role": "user", "content": problem}]}]
    messages: list[str] = []
    rows = _read(write_jsonl([{"id": "fine", "prompt": "a"}, *leaks]), messages=messages)
    assert [row["id"] for row in rows] == ["fine"]
    assert messages[0] == "1 prompts, 2 dropped for overlap"
    assert [sentence.split(":")[1] for sentence in messages[1:]] == [" plain", " chat"]
    assert len(_read(write_jsonl(leaks), exclude="none")) == 2
    with pytest.raises(InputError, match="no prompts left; all 2 overlap humaneval"):
        _read(write_jsonl(leaks))


def test_prompts_overlapping_a_custom_evaluation_set_are_dropped(write_jsonl):
    evaluation_set = write_jsonl(
        [{"task": "Say in one sentence why the sky looks blue at noon and red at dusk."}], "held.jsonl"
    )
    leak = "say in one sentence why the SKY looks blue at noon: and then why the sea does"
    rows = write_jsonl(
        [{"id": "fine", "prompt": "a"}, {"id": "own", "prompt": leak}, {"prompt": humaneval_references()[0]}]
    )
    messages: list[str] = []
    assert [row["id"] for row in _read(rows, exclude=["humaneval", str(evaluation_set)], messages=messages)] == ["fine"]
    assert messages[1].startswith(f"  overlaps {evaluation_set}: own: 'say in one sentence why")
    assert messages[2].startswith("  overlaps humaneval: 2: ")
    assert [row["id"] for row in _read(rows, exclude=str(evaluation_set))] == ["fine", "2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("\n", "has no rows"),
        ('{"promt": "x"}', "has neither a column 'prompt' nor 'messages'"),
        ("{", "not valid JSON"),
    ],
)
def test_a_source_without_prompts_is_refused(tmp_path, content, message):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        _read(tmp_path / "p.jsonl")


def test_responses_are_read_from_runs_and_files_on_disk_and_s3(root):
    (root / "data").mkdir(parents=True)
    for name, row_id in (("unit-00000001.parquet", "a"), ("unit-00000000.parquet", "b"), ("unit-copy.parquet", "c")):
        with atomic_file(root / "data" / name) as file:
            pq.write_table(pa.Table.from_pylist([{**ROW, "id": row_id}]), file)
    write_atomic(root / "rows.jsonl", json.dumps(ROW).encode() + b"\n\n")
    assert [row["id"] for row in read_responses(str(root))] == ["b", "a"]
    assert list(read_responses(str(root / "rows.jsonl"))) == [ROW]
    with pytest.raises(InputError, match="nothing: has no prompts or responses"):
        list(read_responses(str(root / "nothing")))
