"""`peagle evaluate`: flags, output and errors. Evaluations are tested in tests/unit/drafter."""

import json

import pytest
from config_only import skip_waiting, write_head, write_target

from jobs.cli import run
from peagle.bench import acceptance as runner
from peagle.engine.fake import FakeEngine


@pytest.fixture
def models(tmp_path):
    """The flags for a target and a head."""
    return ["--model", str(write_target(tmp_path / "target")), "--drafter", str(write_head(tmp_path / "head"))]


@pytest.fixture
def fake_engines(monkeypatch):
    """Replace the engines of evaluations by fake engines."""

    def evaluate_with_fakes(*args):
        from peagle.engine.fake import ByteTokenizer

        def start(spec, hardware):
            return FakeEngine(num_speculative_tokens=spec.drafter.num_speculative_tokens)

        return evaluate(*args, start=start, tokenizer_of=lambda *_: ByteTokenizer())

    evaluate = runner.evaluate
    monkeypatch.setattr(runner, "evaluate", evaluate_with_fakes)
    skip_waiting(monkeypatch)


@pytest.mark.usefixtures("fake_engines")
def test_evaluate_prints_table_and_writes_result(models, tmp_path, write_jsonl, capsys):
    data = write_jsonl([{"prompt": f"p{i}"} for i in range(4)])
    result = tmp_path / "result.json"
    arguments = ["--dataset", str(data), "-k", "2,4", "-k", "3", "--output", str(tmp_path / "out")]
    assert run(["evaluate", *models, *arguments, "--json", str(result)]) == 0
    assert [cell["k"] for cell in json.loads(result.read_text())["cells"]] == [2, 3, 4]
    printed = capsys.readouterr().out
    assert "[3/3] head K=4: acceptance length 2.00" in printed
    assert "acceptance length  drafts" in printed
    assert "4 of 4 responses" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "3,50"], "K must be whole numbers from 1 to 32"),
        (["--drafter", "none"], "no acceptance to measure"),
        (["--dataset", "nothing.jsonl"], "nothing.jsonl: no such file"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_invalid_arguments_are_refused_before_loading_a_model(arguments, message, capsys):
    assert run(["evaluate", "--model", "no-such-model", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "exit_code"), [({}, 0), ({"head K=3": "no memory"}, 1)])
def test_evaluate_exit_codes(failed, exit_code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "evaluate", lambda *args: ({"failed": failed}, tmp_path))
    monkeypatch.setattr("peagle.bench.acceptance.text_report", lambda report: "table")
    assert run(["evaluate"]) == exit_code
    printed = capsys.readouterr().out
    assert "table" in printed
    assert ("head K=3 failed: run the same command to retry" in printed) is bool(failed)
