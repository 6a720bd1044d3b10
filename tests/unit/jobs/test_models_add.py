import json
import shutil
from pathlib import Path

import pytest

from jobs import cli


@pytest.fixture(autouse=True)
def peagle_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_add_says_what_auto_does_from_now_on(
    peagle_home: Path, shipped_head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["models", "add", str(shipped_head), "--max-concurrency", "4", "--num-speculative-tokens", "6"]) == 0
    printed = capsys.readouterr().out
    assert str(peagle_home / "models" / "smollm2-135m.yaml") in printed
    assert "on cpu: up to 4 requests at once: peagle at K=6" in printed
    assert "on cpu: any number of requests at once: no drafter" in printed
    assert cli.run(["models"]) == 0
    assert "yours" in capsys.readouterr().out


def test_the_result_as_data(tmp_path: Path, peagle_home: Path, shipped_head: Path) -> None:
    result = tmp_path / "result.json"
    assert cli.run(["models", "add", str(shipped_head), "--json", str(result)]) == 0
    written = json.loads(result.read_text())
    assert written["card"]["heads"]["peagle"]["id"] == written["folder"]
    assert Path(written["folder"]).parent == peagle_home / "heads"


def test_add_is_a_command_and_models_still_takes_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["models", "add"], ["models", "smollm2-135m", "add"]):
        with pytest.raises(SystemExit) as stopped:
            cli.run(argv)
        assert stopped.value.code == 2
    assert "usage: peagle models add" in capsys.readouterr().err
    assert cli.run(["models", "smollm2-135m"]) == 0
    assert "SmolLM2 135M" in capsys.readouterr().out


def test_help_of_each_tells_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in ((["models", "--help"], "peagle models add DIR"), (["models", "add", "--help"], "--target")):
        with pytest.raises(SystemExit):
            cli.run(argv)
        assert text in capsys.readouterr().out


def test_a_refusal_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["models", "add", str(tmp_path)]) == 2
    assert "peagle models add: " in capsys.readouterr().err


def test_a_head_is_added_by_its_name_as_well(peagle_home: Path, shipped_head: Path) -> None:
    shutil.copytree(shipped_head, peagle_home / "heads" / "mine-peagle-1a2b3c4d")
    assert cli.run(["models", "add", "mine-peagle-1a2b3c4d", "--name", "other"]) == 0
    assert (peagle_home / "models" / "other.yaml").exists()
