"""Bulk runs with the fake engine on a real Ray cluster."""

import gzip
import json

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from jobs import cli
from peagle.runs.columns import OUTPUT_SCHEMA
from peagle.runs.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("ray_cluster")


def generate(corpus, output, *flags):
    return cli.run(["generate", "--engine", "fake", "--input", str(corpus), "--output", str(output), *flags])


def rows_of(output):
    return ds.dataset(output / "data", format="parquet").to_table().sort_by("id").to_pylist()


def test_every_row_is_committed_or_a_dead_letter(write_jsonl, tmp_path, capsys):
    rows = [{"prompt": f"say {n}", "id": n, "tags": ["a"]} for n in range(20)]
    corpus = write_jsonl([*rows, "{not json", {"prompt": 7}, {"prompt": "x " * 5000}])
    output, result = tmp_path / "run", tmp_path / "result.json"
    assert generate(corpus, output, "--num-speculative-tokens", "3", "--json", str(result)) == 0

    output_rows = rows_of(output)
    assert [row["row_id"] for row in output_rows] == [f"{n:09d}" for n in range(20)]
    assert [(row["prompt"], row["id"], row["tags"]) for row in output_rows] == [
        (row["prompt"], row["id"], row["tags"]) for row in rows
    ]
    assert {*OUTPUT_SCHEMA.names, "row_id"} <= set(output_rows[0])
    assert {row["model"] for row in output_rows} == {"fake"}
    assert all(row["num_accepted_tokens"] == row["num_drafts"] for row in output_rows)
    assert all(row["finish_reason"] in ("stop", "length") and row["response"] for row in output_rows)

    dead_letters = sorted(RunDirectory(output).dead_letters(), key=lambda dead_letter: dead_letter["id"])
    assert [(dead_letter["id"], dead_letter["reason"]) for dead_letter in dead_letters] == [
        ("000000020", "invalid_row"),
        ("000000021", "invalid_prompt"),
        ("000000022", "prompt_too_long"),
    ]
    assert dead_letters[0]["row"] == "{not json"
    assert dead_letters[1]["row"]["prompt"] == 7

    report = json.loads(result.read_text())
    assert report == json.loads((output / "report.json").read_text())
    assert report["account"]["num_output_tokens"] == sum(row["num_output_tokens"] for row in output_rows)
    assert report["account"]["num_failed_rows"] == 3
    assert report["run"]["complete"] is True
    assert report["self_checks"] == {"passed": 1, "failed": 0, "skipped": 0, "unchecked": 0}
    assert "<svg" in (output / "report.html").read_text()
    assert "acceptance" in capsys.readouterr().out


def test_engine_that_fails_its_self_check_commits_nothing(write_jsonl, tmp_path, capsys):
    corpus, output = write_jsonl([{"prompt": f"say {n}"} for n in range(3)]), tmp_path / "run"
    assert generate(corpus, output, "--num-speculative-tokens", "3", "--fake", '{"is_wrong": true}') == 1
    stderr = capsys.readouterr().err
    assert "the engine failed its self-check: token 1 of the greedy answer is '0'" in stderr
    assert "--drafter none" in stderr
    assert not RunDirectory(output).committed()
    (session,) = RunDirectory(output).sessions()
    assert json.loads(session.self_check)["outcome"] == "failed"
    assert generate(corpus, output, "--num-speculative-tokens", "3") == 0, "the run can be resumed"


def test_parquet_folder_keeps_order_and_columns(tmp_path, capsys):
    corpus, output = tmp_path / "corpus", tmp_path / "run"
    corpus.mkdir()
    nested = [{"tags": [f"t{n}"], "score": n / 2} for n in range(7)]
    prompts = [f"say {n}" for n in range(7)]
    table = pa.table({"prompt": prompts, "nested": nested, "maybe": [None, 1, None, 2, None, 3, None]})
    pq.write_table(table.slice(0, 4), corpus / "a.parquet", row_group_size=3)
    pq.write_table(table.slice(4), corpus / "b.PARQUET")
    (corpus / "c.json").write_bytes(b"{}")
    assert generate(corpus, output, "--rows-per-unit", "2") == 0
    note = f"input {corpus}: c.json ignored: unknown format"
    assert note in "".join(capsys.readouterr())
    assert any(item.startswith(note) for item in json.loads((output / "report.json").read_text())["notes"])
    output_rows = rows_of(output)
    assert [{name: row[name] for name in table.column_names} for row in output_rows] == table.to_pylist()


def test_finished_run_is_not_repeated(write_jsonl, tmp_path, capsys):
    corpus, output = write_jsonl([{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "run"
    assert generate(corpus, output) == 0
    before = {path: path.stat().st_mtime_ns for path in (output / "data").iterdir()}
    num_sessions = len(RunDirectory(output).sessions())
    assert generate(corpus, output) == 0
    assert "is already finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (output / "data").iterdir()} == before
    assert len(RunDirectory(output).sessions()) == num_sessions


def test_resume_generates_only_missing_units(write_jsonl, tmp_path):
    corpus, output = write_jsonl([{"prompt": str(n)} for n in range(12)]), tmp_path / "run"
    assert generate(corpus, output, "--rows-per-unit", "2") == 0
    expected = rows_of(output)
    run = RunDirectory(output)
    mtime_ns = run.unit_path(0).stat().st_mtime_ns
    for unit in (2, 5):
        run.unit_path(unit).unlink()
    (run.data / ".unit-00000002.parquet.0123.tmp").write_bytes(b"cut off")
    assert generate(corpus, output) == 0
    compared_columns = [name for name in expected[0] if not name.endswith("_s")]
    assert [[row[name] for name in compared_columns] for row in rows_of(output)] == [
        [row[name] for name in compared_columns] for row in expected
    ]
    assert run.unit_path(0).stat().st_mtime_ns == mtime_ns
    assert not list(run.data.glob(".*"))


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--temperature", "0.7"], "sampling.temperature: was 0.0, now 0.7"),
        (["--limit", "1"], "corpus.limit"),
        (["--num-speculative-tokens", "2"], "drafter"),
        (["--prompt-template", "{{ prompt }}!"], "prompts.template"),
    ],
)
def test_run_with_another_fingerprint_is_refused_with_the_difference(write_jsonl, tmp_path, capsys, flags, difference):
    corpus, output = write_jsonl([{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "run"
    assert generate(corpus, output) == 0
    assert generate(corpus, output, *flags) == 2
    assert difference in capsys.readouterr().err


def test_engines_scale_within_their_range(write_jsonl, tmp_path):
    rows = [{"prompt": str(n), "sampling": {"max_tokens": 1 + n % 40}} for n in range(400)]
    corpus, output = write_jsonl(rows), tmp_path / "run"
    flags = ["--engines", "1:2", "--max-num-seqs", "2", "--fake", '{"token_s": 0.002}', "--ignore-eos"]
    assert generate(corpus, output, *flags) == 0
    run = RunDirectory(output)
    assert [row["id"] for row in rows_of(output)] == [f"{n:09d}" for n in range(400)]
    assert {row["num_output_tokens"] for row in rows_of(output)} == set(range(1, 41))
    assert all(session.ended for session in run.sessions())
    report = json.loads((output / "report.json").read_text())
    # `num_engines` is the maximum number of concurrent engines. The ledger also has sessions of replaced engines.
    assert report["run"]["num_engines"] in (1, 2)
    sizes = [unit.num_rows for unit in run.plan().units]
    assert sum(sizes) == 400
    assert min(sizes) == 1


def test_engines_share_the_units(write_jsonl, tmp_path):
    corpus, output = write_jsonl([{"prompt": str(n)} for n in range(60)]), tmp_path / "run"
    assert generate(corpus, output, "--engines", "2", "--rows-per-unit", "1", "--max-num-seqs", "1") == 0
    run = RunDirectory(output)
    assert len(rows_of(output)) == 60
    sessions = {session.session_id for session in run.sessions()}
    assert len(sessions) == 2
    assert {session.num_devices for session in run.sessions()} == {1}
    assert {usage.session_id for usage in run.usages()} <= sessions


def test_openai_batch_has_openai_output_and_error_files(tmp_path, capsys):
    def request(custom_id, url="/v1/chat/completions", **body):
        prompt = {"messages": [{"role": "user", "content": custom_id}]} if "chat" in url else {"prompt": custom_id}
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", **prompt, **body}}

    requests = [
        *(request(f"chat-{n}") for n in range(5)),
        request("short", max_tokens=1, temperature=0.5, seed=3),
        request("text", "/v1/completions", logprobs=1),
        request("several", n=2, temperature=1, logprobs=True, top_logprobs=2),
        request("formatted", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}),
        request("image", "/v1/images"),
        request("wrong", temperature=-1),
        request("unknown", temprature=1),
        request("long", "/v1/completions", prompt="x" * 9000),
    ]
    corpus, output = tmp_path / "batch.jsonl.gz", tmp_path / "run"
    corpus.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in requests).encode() + b"{bad"))
    assert generate(corpus, output, "--rows-per-unit", "3", "--max-tokens", "4") == 0

    def lines(name):
        return [json.loads(line) for line in (output / "export" / "openai-batch" / name).read_text().splitlines()]

    answers = {line["custom_id"]: line["response"]["body"] for line in lines("output.jsonl")}
    assert list(answers) == [r["custom_id"] for r in requests[:9]]
    chats = {
        custom_id: ChatCompletion.model_validate(body, strict=True)
        for custom_id, body in answers.items()
        if custom_id != "text"
    }
    assert chats["short"].usage.completion_tokens == 1
    assert len(chats["several"].choices) == 2
    first = chats["several"].choices[0]
    assert "".join(token.token for token in first.logprobs.content) == first.message.content
    text = Completion.model_validate(answers["text"], strict=True)
    assert (text.object, len(text.choices[0].logprobs.tokens)) == ("text_completion", text.usage.completion_tokens)

    errors = {line["custom_id"]: line["response"]["body"]["error"] for line in lines("errors.jsonl")}
    assert {custom_id: error["code"] for custom_id, error in errors.items()} == {
        "image": "invalid", "wrong": "invalid", "unknown": "invalid", "long": "prompt_too_long", None: "invalid_row",
    }  # fmt: skip
    assert "batch.jsonl.gz line 10: url must be" in errors["image"]["message"]
    assert "batch.jsonl.gz line 14: not valid JSON" in errors[None]["message"]

    rows = {row["custom_id"]: row for row in rows_of(output)}
    assert json.loads(rows["short"]["body"]) == requests[5]["body"]
    assert rows["chat-0"]["completions"] is None
    assert rows["several"]["num_output_tokens"] == sum(c["num_output_tokens"] for c in rows["several"]["completions"])

    (output / "export" / "openai-batch" / "output.jsonl").unlink()
    assert generate(corpus, output, "--max-tokens", "4") == 0
    assert "9 rows, 5 dead letters as openai-batch" in capsys.readouterr().out
    assert len(lines("output.jsonl")) == 9


def test_csv_to_jsonl_with_template_and_row_parameters(tmp_path):
    corpus, output = tmp_path / "corpus.csv.zst", tmp_path / "run"
    text = b'word,sampling\none,\n"two\nlines","{""max_tokens"": 1}"\nthree,"{""n"": 0}"\n'
    with pa.CompressedOutputStream(str(corpus), "zstd") as stream:
        stream.write(text)
    flags = ["--prompt-template", "Say {{ word }}", "--output-format", "jsonl", "--rows-per-unit", "1"]
    assert generate(corpus, output, *flags) == 0
    exported = [json.loads(line) for line in (output / "export" / "jsonl" / "output.jsonl").read_text().splitlines()]
    assert [row["word"] for row in exported] == ["one", "two\nlines"]
    assert exported[1]["num_output_tokens"] == 1
    (dead_letter,) = RunDirectory(output).dead_letters()
    assert (dead_letter["reason"], dead_letter["row"]["word"]) == ("invalid", "three")


def test_report_compares_runs(write_jsonl, tmp_path, capsys):
    corpus, a, b = write_jsonl([{"prompt": "a"}]), tmp_path / "a", tmp_path / "b"
    assert generate(corpus, a) == 0
    assert generate(corpus, b, "--num-speculative-tokens", "4") == 0
    page = tmp_path / "both.html"
    assert cli.run(["report", str(a), str(b), "--html", str(page)]) == 0
    assert page.read_text().count("fake") >= 2
