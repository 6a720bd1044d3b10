import json
import shutil
from pathlib import Path

import pytest

from jobs import cli


@pytest.fixture(autouse=True)
def peagle_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_added_model_is_printed_and_listed(peagle_home, shipped_head, capsys):
    assert cli.run(["models", "add", str(shipped_head), "--max-concurrency", "4", "--num-speculative-tokens", "6"]) == 0
    printed = capsys.readouterr().out
    assert str(peagle_home / "models" / "smollm2-135m.yaml") in printed
    assert "on cpu: up to 4 requests at once: peagle at K=6" in printed
    assert "on cpu: any number of requests at once: no drafter" in printed
    assert cli.run(["models"]) == 0
    assert "yours" in capsys.readouterr().out


def test_json_result_has_the_card_and_folder(tmp_path, peagle_home, shipped_head):
    result = tmp_path / "result.json"
    assert cli.run(["models", "add", str(shipped_head), "--json", str(result)]) == 0
    written = json.loads(result.read_text())
    assert written["card"]["heads"]["peagle"]["id"] == written["folder"]
    assert Path(written["folder"]).parent == peagle_home / "heads"


def test_head_folder_can_be_given_by_name(peagle_home, shipped_head):
    shutil.copytree(shipped_head, peagle_home / "heads" / "mine-peagle-1a2b3c4d")
    assert cli.run(["models", "add", "mine-peagle-1a2b3c4d", "--name", "other"]) == 0
    assert (peagle_home / "models" / "other.yaml").exists()
