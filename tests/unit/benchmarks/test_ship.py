import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.drafter import ship
from peagle.errors import DrafterError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    save_file({"lm_head.weight": torch.arange(20.0).view(10, 2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's heads, with an older one of the same target."""
    folder = tmp_path / "heads"
    (folder / "tiny-eagle3").mkdir(parents=True)
    (folder / "tiny-eagle3" / "README.md").write_text("the older one's card")
    monkeypatch.setattr(ship, "HEADS_FOLDER", folder)
    return folder


def trained(folder: Path, rows: list[int], lm_head: torch.Tensor) -> Path:
    folder.mkdir()
    config = {"speculators_model_type": "eagle3", "hidden_size": 2, "vocab_size": 10, "draft_vocab_size": len(rows)}
    (folder / "config.json").write_text(json.dumps(config))
    d2t = torch.tensor(rows) - torch.arange(len(rows))
    save_file({"lm_head.weight": lm_head, "d2t": d2t, "norm.weight": torch.ones(2)}, folder / "model.safetensors")
    return folder


def test_the_new_head_takes_the_place_of_the_old_one(tmp_path: Path, target: Path, heads: Path) -> None:
    rows = [0, 3, 9]
    head = trained(tmp_path / "head", rows, torch.arange(20.0).view(10, 2)[rows])
    assert ship.ship(head, "tiny", target) == heads / "tiny-eagle3"
    assert set(load_file(heads / "tiny-eagle3" / "model.safetensors")) == {"d2t", "norm.weight"}
    assert [path.name for path in heads.iterdir()] == ["tiny-eagle3"]
    assert not (heads / "tiny-eagle3" / "README.md").exists()


def test_a_head_with_an_lm_head_of_its_own_leaves_the_old_one(tmp_path: Path, target: Path, heads: Path) -> None:
    head = trained(tmp_path / "head", [0, 3, 9], torch.zeros(3, 2))
    with pytest.raises(DrafterError, match="not the target's"):
        ship.ship(head, "tiny", target)
    assert (heads / "tiny-eagle3" / "README.md").read_text() == "the older one's card"
    assert [path.name for path in heads.iterdir()] == ["tiny-eagle3"]
