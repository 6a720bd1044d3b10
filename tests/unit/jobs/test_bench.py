"""`peagle bench`: flags, output and errors. Measurements are tested in tests/unit/bench."""

import json
import os
import signal
import subprocess
import sys

import pytest
from config_only import skip_waiting, write_target

from jobs.cli import run
from peagle.bench import run as runner
from peagle.engine.fake import ByteTokenizer, FakeEngine


@pytest.fixture
def target(tmp_path):
    return str(write_target(tmp_path / "target"))


def test_bench_prints_tables_and_writes_result(target, tmp_path, write_jsonl, monkeypatch, capsys):
    def bench_with_fakes(*args):
        def start(spec, hardware):
            return FakeEngine(num_speculative_tokens=spec.drafter.num_speculative_tokens if spec.drafter else 0)

        return bench(*args, start=start, tokenizer_of=lambda *_: ByteTokenizer())

    bench = runner.bench
    monkeypatch.setattr(runner, "bench", bench_with_fakes)
    skip_waiting(monkeypatch)
    data, result = write_jsonl([{"prompt": f"p{i}"} for i in range(4)]), tmp_path / "result.json"
    arguments = ["--dataset", str(data), "--methods", "none,ngram", "-k", "3", "--concurrency", "1,2", "--repeats", "1"]
    code = run(["bench", "--model", target, *arguments, "--output", str(tmp_path / "out"), "--json", str(result)])
    assert code == 0
    assert [(cell["method"], cell["concurrency"]) for cell in json.loads(result.read_text())["cells"]] == [
        ("none", 1), ("none", 2), ("ngram", 1), ("ngram", 2),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "n-gram K=3: starting the engine" in printed
    assert "best n-gram / no speculation" in printed
    assert "4 of 4 responses" in printed


@pytest.mark.parametrize(
    ("num_left", "failed", "exit_code"), [(0, {}, 0), (2, {}, 3), (2, {"P-EAGLE K=5": "no memory"}, 1)]
)
def test_bench_exit_codes(num_left, failed, exit_code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "bench", lambda *args: ({"num_passes_left": num_left, "failed": failed}, tmp_path))
    monkeypatch.setattr("peagle.bench.report.text_tables", lambda report: "tables")
    assert run(["bench", "--time-budget-s", "60"]) == exit_code
    printed = capsys.readouterr().out
    assert ("run the same command to continue" in printed) is bool(num_left)
    assert ("P-EAGLE K=5 failed: run the same command to retry" in printed) is bool(failed)


def test_sigterm_interrupts_bench(tmp_path, monkeypatch, capsys):
    previous_handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runner, "bench", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    assert run(["bench"]) == 3
    assert "peagle bench: interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is previous_handler


def test_bench_runs_without_ray():
    code = "import sys; sys.modules['ray'] = None; import jobs.bench, peagle.bench.run, peagle.bench.report"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
