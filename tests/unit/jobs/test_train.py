"""`peagle train`: flags reach the configuration, and what went wrong reaches the user. Training: unit/drafter."""

from pathlib import Path

import pytest

from jobs.cli import run


def test_a_missing_flag_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--output", "out"]) == 2
    assert "responses" in capsys.readouterr().err


def test_responses_that_are_not_there_end_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}')
    arguments = ["--target", str(target), "--responses", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
    assert run(["train", *arguments]) == 2
    assert "no responses there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
