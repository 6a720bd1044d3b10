"""`peagle runs`, `peagle show` and the class `Run`, with a run that is half committed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs import cli
from peagle.errors import ConfigError
from peagle.runs.results import Run

GOLDEN = Path(__file__).parents[2] / "golden" / "run"


@pytest.fixture
def folder(tmp_path):
    """A folder with a run, an empty folder and a training folder."""
    shutil.copytree(GOLDEN, tmp_path / "runs" / "july" / "first")
    (tmp_path / "runs" / "empty").mkdir()
    training = tmp_path / "runs" / "head"
    training.mkdir()
    (training / "run.json").write_text("{}")
    return tmp_path / "runs"


def test_runs_in_a_folder_are_listed(folder, capsys):
    assert cli.run(["runs", str(folder), "--json", str(folder / "list.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[1].split()[:5] == [str(folder / "july" / "first"), "stopped", "6/12", "0", "64"]
    (listed,) = json.loads((folder / "list.json").read_text())["runs"]
    assert (listed["num_rows_left"], listed["usd"]) == (6, pytest.approx(0.00337, abs=1e-5))


def test_folder_without_runs_is_reported(folder, capsys):
    assert cli.run(["runs", str(folder / "empty")]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert cli.run(["runs", str(folder / "missing")]) == 2
    assert f"{folder / 'missing'}: the folder does not exist" in capsys.readouterr().err


def test_show_prints_text_or_json_lines(folder, capsys):
    run = str(folder / "july" / "first")
    assert cli.run(["show", run, "--limit", "2"]) == 0
    first, text, second, _ = capsys.readouterr().out.splitlines()
    assert (first, second) == ("000000000", "000000001")
    assert text.startswith("  | 74b5")
    assert cli.run(["show", run, "--format", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["input_id"] for row in rows] == [f"p{number}" for number in range(6)]
    assert rows == list(Run.open(run).rows())


def test_show_prints_failed_rows(folder, capsys):
    run = folder / "july" / "first"
    assert cli.run(["show", str(run), "--failed"]) == 0
    assert capsys.readouterr().out == "no failed rows\n"
    assert cli.run(["show", str(run), "--limit", "0"]) == 2
    assert "--limit must be at least 1, got 0" in capsys.readouterr().err


def test_run_is_read_as_pandas_and_arrow(folder):
    run = Run.open(str(folder / "july" / "first"))
    frame = run.to_pandas(["id", "num_output_tokens"])
    assert list(frame.columns) == ["id", "num_output_tokens"]
    assert frame["num_output_tokens"].sum() == run.status().num_output_tokens == 64
    assert run.to_arrow().num_rows == 6
    assert run.report["account"]["num_output_tokens"] == 64
    with pytest.raises(ConfigError, match="is not a run directory"):
        Run.open(str(folder / "empty"))


def test_bash_completes_commands_and_flags(capsys):
    assert cli.run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    bash = shutil.which("bash")
    assert bash is not None
    completions = {"se": "serve", "serve k": "keys", "generate --max-to": "--max-tokens", "serve keys --tok": ""}
    for typed, completed in completions.items():
        array = " ".join(["peagle", *typed.split()])
        code = f"{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(typed.split())}; _peagle; echo ${{COMPREPLY[@]}}"
        result = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == completed
