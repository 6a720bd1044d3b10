import datetime
import io
import json
import os
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from usage_records import unit_usage

from jobs import cli
from peagle.corpus.rows import Span
from peagle.errors import ConfigError, PeagleError
from peagle.runs import export as export_module
from peagle.runs.columns import OUTPUT_SCHEMA
from peagle.runs.directory import RunDirectory
from peagle.runs.export import describe_answers, export
from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.prepare import plan_retry
from peagle.storage import atomic_file, s3_files, write_atomic

NUM_UNITS, NUM_COMMITTED_ROWS = 3, 2  # committed rows of the three rows of each unit


def usage_of_unit(unit):
    return unit_usage(
        num_rows=NUM_COMMITTED_ROWS,
        num_failed_rows=int(unit == 1),
        num_prompt_tokens=8,
        num_output_tokens=6,
        finished_at=100.5 + unit,
    )


def output_table(ids, **columns):
    rows = [
        {
            **dict.fromkeys(OUTPUT_SCHEMA.names),
            "id": id_, "response": "é", "finish_reason": "stop", "num_prompt_tokens": 4, "num_output_tokens": 3,
            "model": "m",
        }
        for id_ in ids
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=OUTPUT_SCHEMA)
    for index, (name, values) in enumerate(columns.items()):
        table = table.add_column(index, name, pa.array(values))
    return table


@pytest.fixture
def make_run(root):
    def make(input_format="jsonl", **manifest):
        units = tuple(
            WorkUnit(
                unit=unit,
                first_id=unit * 3,
                span=Span(path="/srv/corpus.jsonl", format=input_format, first_row=unit * 3, num_rows=3),
            )
            for unit in range(NUM_UNITS)
        )
        plan = Plan(units=units, rows_per_unit=3, schema=pa.schema([("x", pa.string())]), corpus_fingerprint="c")
        run = RunDirectory(root)
        run.create({"run_id": "r", "fingerprint": {"prompts": {"chat": True}}, **manifest}, plan)
        return run

    return make


def commit(run, unit, *, row=None, **columns):
    letters = [{"id": "4", "unit": 1, "reason": "invalid", "message": "no", "row": row}] if unit == 1 else []
    ids = [f"{unit * 3 + index:09d}" for index in range(NUM_COMMITTED_ROWS)]
    assert run.commit(unit, output_table(ids, **columns), usage_of_unit(unit), letters)


@pytest.fixture
def finished_run(make_run):
    """A run whose units are all committed, in the order of the corpus."""
    run = make_run()
    for unit in range(NUM_UNITS):
        commit(run, unit)
    return run


def exported_lines(run, output_format, name="output.jsonl"):
    return [json.loads(line) for line in (run.root / "export" / output_format / name).read_bytes().splitlines()]


def exported_parquet(run):
    return io.BytesIO((run.root / "export" / "parquet" / "output.parquet").read_bytes())


def test_jsonl_export_has_rows_in_order_and_dead_letters(make_run):
    run = make_run()
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    for unit in (2, 0, 1):
        commit(run, unit, row="{bad", when=[moment] * 2, raw=[b"\xff"] * 2, score=[float("nan"), 0.5])
    result = export(run, "jsonl")
    rows = exported_lines(run, "jsonl")
    assert [row["id"] for row in rows] == [f"{n:09d}" for n in (0, 1, 3, 4, 6, 7)]
    assert (rows[0]["response"], rows[0]["when"], rows[0]["raw"], rows[0]["score"], rows[1]["score"]) == (
        "é", moment.isoformat(), "/w==", None, 0.5,
    )  # fmt: skip
    assert [letter["row"] for letter in exported_lines(run, "jsonl", "errors.jsonl")] == ["{bad"]
    assert (result.num_rows, result.num_failed_rows, result.num_units) == (6, 1, 3)
    assert result.num_nulls == {"score": 3}
    assert "note: column 'score': NaN or infinity became null in 3 rows" in result.describe()
    assert export(run, "jsonl", force=False) == result
    parquet_result = export(run, "parquet")
    assert (parquet_result.num_nulls, "note" in parquet_result.describe()) == ({}, False)


def test_openai_export_has_a_line_for_each_custom_id(make_run):
    run = make_run("openai-batch")
    urls = ["/v1/chat/completions", "/v1/completions"]
    for unit in range(NUM_UNITS):
        row = {"custom_id": "bad", "body": {}}
        commit(run, unit, row=row, custom_id=[f"a{unit}", f"b{unit}"], url=urls)
    export(run, "openai-batch")
    rows = exported_lines(run, "openai-batch")
    assert [row["custom_id"] for row in rows] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [row["response"]["body"]["object"] for row in rows[:2]] == ["chat.completion", "text_completion"]
    assert [row["response"]["body"]["created"] for row in rows[::2]] == [100, 101, 102]
    (error,) = exported_lines(run, "openai-batch", "errors.jsonl")
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert len({row["id"] for row in [*rows, error]}) == 7


@pytest.mark.parametrize(
    ("input_format", "row", "custom_id"), [("jsonl", {"x": 1}, "4"), ("openai-batch", "{bad", None)]
)
def test_custom_id_is_the_row_id_unless_the_input_is_a_batch(make_run, input_format, row, custom_id):
    run = make_run(input_format)
    columns = {"custom_id": ["a", "b"], "url": ["/v1/completions"] * 2} if input_format == "openai-batch" else {}
    for unit in range(NUM_UNITS):
        commit(run, unit, row=row, **columns)
    export(run, "openai-batch")
    assert exported_lines(run, "openai-batch")[0]["custom_id"] == ("a" if columns else "000000000")
    assert exported_lines(run, "openai-batch", "errors.jsonl")[0]["custom_id"] == custom_id


@pytest.mark.parametrize(
    ("reason", "message", "manifest", "message_start"),
    [
        ("invalid_row", "PATH line 3: not valid JSON", {}, "corpus.jsonl line 3: not valid JSON"),
        ("refused", "too long", {"served_name": "m"}, "too long"),
        ("engine_failed", "vLLM failed on it: OSError('/srv/x')", {"served_name": "m"}, "the engine"),
        ("engine_failed", "vLLM failed on it: OSError('/srv/x')", {}, "vLLM failed on it: OSE"),
    ],
)
def test_error_lines_hide_server_paths(make_run, reason, message, manifest, message_start):
    run = make_run("openai-batch", **manifest)
    span = run.plan().units[0].span
    assert span.path.startswith("/")
    message = message.replace("PATH", span.path)
    dead_letter = {"reason": reason, "id": "4", "unit": 0, "row": "{", "message": message}
    rows = output_table(["000000000"], custom_id=["a"], url=["/v1/completions"])
    assert run.commit(0, rows, usage_of_unit(0), [dead_letter])
    export(run, "openai-batch", partial=True)
    (error,) = exported_lines(run, "openai-batch", "errors.jsonl")
    api_error = error["error"] or error["response"]["body"]["error"]
    assert api_error["message"].startswith(message_start)
    assert span.path not in json.dumps(error)


@pytest.mark.parametrize(
    ("manifest", "model"), [({"served_name": "plain"}, "plain"), ({"served_name": None}, "m"), ({}, "m")]
)
def test_openai_export_uses_the_served_name(make_run, manifest, model):
    run = make_run("openai-batch", **manifest)
    commit(run, 0, custom_id=["a", "b"], url=["/v1/completions"] * 2)
    export(run, "openai-batch", partial=True)
    assert [row["response"]["body"]["model"] for row in exported_lines(run, "openai-batch")] == [model] * 2


def test_row_groups_of_a_parquet_export_span_units(finished_run, monkeypatch):
    monkeypatch.setattr(export_module, "_ROW_GROUP_ROWS", 4)
    export(finished_run, "parquet")
    file = pq.ParquetFile(exported_parquet(finished_run))
    assert file.schema_arrow.equals(OUTPUT_SCHEMA)
    assert [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)] == [4, 2]
    file.close()


@pytest.mark.parametrize("root", ["disk"], indirect=True)
def test_export_is_repeated_only_if_it_is_incomplete(finished_run):
    first = export(finished_run, "jsonl")
    file = finished_run.root / "export" / "jsonl" / "output.jsonl"
    content, modified_at = file.read_bytes(), file.stat().st_mtime_ns
    assert export(finished_run, "jsonl", force=False) == first
    assert file.stat().st_mtime_ns == modified_at
    file.write_bytes(b"cut off")
    stale_file, recent_file = (file.parent / f".output.jsonl.{number}.tmp" for number in (1, 2))
    for temporary_file in (stale_file, recent_file):
        temporary_file.write_bytes(b"partial")
    os.utime(stale_file, (time.time() - 2 * 24 * 3600,) * 2)
    assert export(finished_run, "jsonl", force=False) == first
    assert file.read_bytes() == content
    assert list(file.parent.glob(".*")) == [recent_file]


@pytest.mark.parametrize("root", ["s3"], indirect=True)
def test_export_to_s3_keeps_unfinished_recent_uploads(finished_run, s3, monkeypatch):
    monkeypatch.setattr(s3_files, "_PART_BYTES", 5 << 20)  # S3's minimum
    folder = finished_run.root / "export" / "jsonl"
    with atomic_file(folder / "output.jsonl") as unfinished_upload:
        unfinished_upload.write(bytes(6 << 20))  # its first part is uploaded
        export(finished_run, "jsonl")
        unfinished_upload.write(b"the rest")
    assert (folder / "output.jsonl").read_bytes() == bytes(6 << 20) + b"the rest"


def test_export_is_repeated_after_a_new_commit(finished_run):
    export(finished_run, "jsonl")
    finished_run.unit_path(1).unlink()
    ids = [f"{3 + index:09d}" for index in range(NUM_COMMITTED_ROWS)]
    assert finished_run.commit(
        1, output_table(ids, x=["new"] * NUM_COMMITTED_ROWS), replace(usage_of_unit(1), session_id="again"), []
    )
    result = export(RunDirectory(finished_run.root), "jsonl", force=False)
    assert [row.get("x") for row in exported_lines(finished_run, "jsonl")] == [None, None, "new", "new", None, None]
    assert result.num_failed_rows == 0
    assert exported_lines(finished_run, "jsonl", "errors.jsonl") == []


def test_export_whose_metadata_has_no_commits_is_repeated(finished_run):
    first = export(finished_run, "jsonl")
    metadata_path = finished_run.root / "export" / "jsonl" / "export.json"
    metadata = json.loads(metadata_path.read_bytes())
    del metadata["commits"]  # as an older version of peagle wrote it
    write_atomic(metadata_path, json.dumps(metadata).encode())
    assert export(finished_run, "jsonl", force=False) == first
    assert json.loads(metadata_path.read_bytes())["commits"] == first.commits


def test_partial_export_must_be_requested(make_run, capsys):
    run = make_run()
    commit(run, 0)
    with pytest.raises(ConfigError, match=r"1 of 3 units are committed(.|\n)*--partial"):
        export(run, "jsonl")
    assert cli.run(["export", str(run), "--format", "jsonl", "--partial"]) == 0
    assert "2 rows as jsonl" in capsys.readouterr().out
    commit(run, 2)
    assert export(run, "jsonl", partial=True, force=False).num_rows == 4


def test_damaged_unit_is_named(finished_run):
    data = finished_run.unit_path(1).read_bytes()
    write_atomic(finished_run.unit_path(1), data[:4] + b"\0" * 200 + data[204:])
    with pytest.raises(PeagleError, match=r"unit-00000001\.parquet is damaged"):
        export(finished_run, "jsonl")
    assert not (finished_run.root / "export" / "jsonl" / "output.jsonl").exists()


def test_unknown_format_or_folder_is_refused(tmp_path, capsys):
    assert cli.run(["export", str(tmp_path), "--format", "json"]) == 2
    assert "did you mean jsonl" in capsys.readouterr().err
    assert cli.run(["export", str(tmp_path), "--format", "jsonl"]) == 2
    assert "not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_retried_rows_keep_their_position(make_run, output_format):
    run = make_run()
    for unit in range(NUM_UNITS):
        ids = [f"{unit * 3 + index:09d}" for index in (0, 2)]
        letters = [{"id": f"{unit * 3 + 1:09d}", "unit": unit, "reason": "x", "message": "no", "row": {}}]
        assert run.commit(unit, output_table(ids), replace(usage_of_unit(unit), num_failed_rows=1), letters)
    plan = plan_retry(run, run.plan())
    for retry in plan.units[3:5]:
        assert run.commit(retry.unit, output_table([retry.row_id(0)]), usage_of_unit(retry.unit), [])
    with pytest.raises(ConfigError, match="5 of 6 units are committed"):
        export(run, output_format)
    result = export(run, output_format, partial=True)
    rows = (
        exported_lines(run, "jsonl") if output_format == "jsonl" else pq.read_table(exported_parquet(run)).to_pylist()
    )
    assert [int(row["id"]) for row in rows] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert (result.num_rows, result.num_failed_rows, result.num_units) == (8, 0, 5)


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_infinite_logprobs_are_exported_as_valid_json(make_run, url):
    run = make_run("openai-batch")
    logprob = {"token": "a", "logprob": float("-inf"), "top": [{"token": "b", "logprob": float("nan")}]}
    completions_type = OUTPUT_SCHEMA.field("completions").type
    completion = {"text": "a", "finish_reason": "stop", "num_output_tokens": 1, "logprobs": [logprob]}
    table = output_table(["000000000", "000000001"], custom_id=["a", "b"], url=[url] * 2)
    index = table.schema.get_field_index("completions")
    table = table.set_column(index, "completions", pa.array([[completion], None], completions_type))
    assert run.commit(0, table, usage_of_unit(0), [])
    export(run, "openai-batch", partial=True)
    text = (run.root / "export" / "openai-batch" / "output.jsonl").read_bytes().splitlines()[0]
    logprobs = json.loads(text, parse_constant=pytest.fail)["response"]["body"]["choices"][0]["logprobs"]
    if url == "/v1/completions":
        assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-9999.0], [{"b": -9999.0}])
    else:
        (token,) = logprobs["content"]
        assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def run_with_answers(root, responses):
    units = tuple(
        WorkUnit(unit=unit, first_id=unit, span=Span(path="a", format="jsonl", first_row=unit, num_rows=1))
        for unit in range(len(responses))
    )
    plan = Plan(units=units, rows_per_unit=1, schema=pa.schema([("x", pa.string())]), corpus_fingerprint="c")
    run = RunDirectory(root)
    run.create({"run_id": "r"}, plan)
    for unit, response in enumerate(responses):
        row = {**dict.fromkeys(OUTPUT_SCHEMA.names), "id": f"{unit:09d}", "response": response}
        run.commit(unit, pa.Table.from_pylist([row], schema=OUTPUT_SCHEMA), unit_usage(), [])
    return run


def test_first_two_answers_are_shown(root):
    lines = describe_answers(run_with_answers(root, ["\n  one\n\ttwo\n", "a\nb\nc\nd\ne", "third"])).splitlines()
    assert lines[0] == f"answers: {root}/data, column response of unit-*.parquet; the first 2:"
    assert lines[1:4] == ["  000000000", "  |   one", "  |     two"]
    assert lines[4:] == ["  000000001", "  | a", "  | b", "  | c", "  | d", "  | ..."]
    assert describe_answers(run_with_answers(root / "empty", [])) == ""


def test_control_sequences_in_answers_are_escaped(root):
    assert "\x1b" not in describe_answers(run_with_answers(root, ["\x1b[2J\x07gone" + "x" * 500]))
