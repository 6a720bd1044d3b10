"""`peagle tune`: flags, output and errors. Tuning is tested in tests/unit/tuning."""

import json
import subprocess
import sys

import pytest
from config_only import skip_waiting, write_target

from jobs.cli import run
from peagle.engine.fake import ByteTokenizer, FakeEngine, FakeTraits
from peagle.tuning import run as runner


@pytest.fixture
def arguments(tmp_path, write_jsonl, monkeypatch):
    """Arguments that tune two configurations with fake engines."""

    def tune_with_fakes(*args):
        return tune(
            *args, start=lambda *_: FakeEngine(FakeTraits(token_s=0.02)), tokenizer_of=lambda *_: ByteTokenizer()
        )

    tune = runner.tune
    monkeypatch.setattr(runner, "tune", tune_with_fakes)
    skip_waiting(monkeypatch)
    data = write_jsonl([{"prompt": f"p{i}"} for i in range(4)])
    options = ["--model", str(write_target(tmp_path / "target")), "--dataset", str(data), "--methods", "none"]
    return ["tune", *options, "--max-num-seqs", "1,2", "--max-tokens", "8", "--output", str(tmp_path / "out")]


def test_tune_prints_table_and_writes_profile(arguments, tmp_path, capsys):
    profile, result = tmp_path / "mine.yaml", tmp_path / "result.json"
    assert run([*arguments, "--profile-output", str(profile), "--json", str(result)]) == 0
    printed = capsys.readouterr().out
    assert "no speculation: starting the engine" in printed
    assert "No speculation: " in printed
    assert f"profile: {profile}" in printed
    assert json.loads(result.read_text())["engine"]["max_num_seqs"] == 2
    assert "max_num_seqs: 2" in profile.read_text()


def test_tune_does_not_overwrite_the_file_in_peagle_profile(arguments, tmp_path, monkeypatch):
    existing = tmp_path / "taken.yaml"
    existing.write_text("another tuning")
    monkeypatch.setenv("PEAGLE_PROFILE", str(existing))
    assert run(arguments) == 0
    assert existing.read_text() == "another tuning"
    assert "max_num_seqs: 2" in (tmp_path / "out" / "profile.yaml").read_text()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--time-budget-s", "time_budget_s: Input should be greater than 0"),
        ("--budget-min", "time_budget_s: Input should be greater than 0, not -180.0"),
    ],
)
def test_budget_must_be_positive(flag, message, capsys):
    assert run(["tune", flag, "-3"]) == 2
    assert message in capsys.readouterr().err


def test_importing_tuning_loads_no_heavy_modules():
    heavy = "[m for m in ('ray', 'torch', 'vllm') if m in sys.modules]"
    code = f"import sys, peagle.tuning.run, peagle.tuning.run; print({heavy})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
