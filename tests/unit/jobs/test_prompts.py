import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.cli import run


@pytest.fixture(autouse=True)
def small_library(monkeypatch):
    """Use one package instead of the whole standard library, which takes ten seconds to parse."""
    monkeypatch.setattr("sysconfig.get_paths", lambda *_: {"stdlib": str(Path(json.__file__).parent)})


def test_jsonl_and_parquet_have_the_same_prompts(tmp_path, capsys):
    for name in ("prompts.jsonl", "prompts.parquet"):
        assert run(["prompts", "--output", str(tmp_path / name), "--limit", "5"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert lines == pq.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert [sorted(line) for line in lines] == [["category", "id", "module", "name", "prompt"]] * 5
    assert "5 prompts of" in capsys.readouterr().out


def test_excluded_prompts_are_listed(tmp_path, capsys):
    evaluation_set, output, result = (tmp_path / name for name in ("held.jsonl", "prompts.jsonl", "result.json"))
    evaluation_set.write_text(json.dumps({"docstring": json.load.__doc__}) + "\n")
    assert run(["prompts", "--output", str(output), "--exclude", str(evaluation_set), "--json", str(result)]) == 0
    (dropped,) = json.loads(result.read_text())["dropped"]
    assert (dropped["name"], dropped["evaluation_set"]) == ("load", str(evaluation_set))
    assert f"dropped __init__.load: shares {dropped['overlap']!r} with {evaluation_set}" in capsys.readouterr().out
    assert '"name": "load"' not in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "prompts.csv"], "must end in .jsonl or .parquet"),
        (["--output", "p.jsonl", "--limit", "0"], "--limit must be at least 1"),
        (["--output", "p.jsonl", "--source", "stdlibs"], "stdlibs: unknown source of prompts"),
        (["--output", "p.jsonl", "--exclude", "humanevil"], "--exclude humanevil: unknown evaluation set"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, capsys):
    assert run(["prompts", *arguments]) == 2
    assert message in capsys.readouterr().err
