import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.drafter import ship
from peagle.errors import DrafterError

TARGET, UPSTREAM = "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"


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
    (folder / "smollm2-135m-eagle3").mkdir(parents=True)
    (folder / "smollm2-135m-eagle3" / "README.md").write_text("the older one's card")
    monkeypatch.setattr(ship, "HEADS_FOLDER", folder)
    return folder


def trained(folder: Path, rows: list[int], lm_head: torch.Tensor, verifier: str = UPSTREAM) -> Path:
    folder.mkdir()
    config = {"speculators_model_type": "eagle3", "hidden_size": 2, "vocab_size": 10, "draft_vocab_size": len(rows)}
    config |= {"speculators_config": {"verifier": {"name_or_path": verifier}}}
    (folder / "config.json").write_text(json.dumps(config))
    d2t = torch.tensor(rows) - torch.arange(len(rows))
    save_file({"lm_head.weight": lm_head, "d2t": d2t, "norm.weight": torch.ones(2)}, folder / "model.safetensors")
    return folder


def test_the_new_head_takes_the_place_of_the_old_one(tmp_path: Path, target: Path, heads: Path) -> None:
    rows = [0, 3, 9]
    head = trained(tmp_path / "head", rows, torch.arange(20.0).view(10, 2)[rows])
    assert ship.ship(head, TARGET, target) == heads / "smollm2-135m-eagle3"
    assert set(load_file(heads / "smollm2-135m-eagle3" / "model.safetensors")) == {"d2t", "norm.weight"}
    assert [path.name for path in heads.iterdir()] == ["smollm2-135m-eagle3"]
    assert not (heads / "smollm2-135m-eagle3" / "README.md").exists()


def test_a_head_with_an_lm_head_of_its_own_leaves_the_old_one(tmp_path: Path, target: Path, heads: Path) -> None:
    head = trained(tmp_path / "head", [0, 3, 9], torch.zeros(3, 2))
    with pytest.raises(DrafterError, match="not the target's"):
        ship.ship(head, TARGET, target)
    assert (heads / "smollm2-135m-eagle3" / "README.md").read_text() == "the older one's card"
    assert [path.name for path in heads.iterdir()] == ["smollm2-135m-eagle3"]


def test_a_head_that_nobody_could_load_leaves_the_old_one(tmp_path: Path, target: Path, heads: Path) -> None:
    rows = [0, 3, 9]
    lm_head = torch.arange(20.0).view(10, 2)[rows]
    assert ship.ship(trained(tmp_path / "named", rows, lm_head, verifier=TARGET), TARGET, target)
    with pytest.raises(DrafterError, match="its target is not one that peagle carries"):
        ship.ship(trained(tmp_path / "other", rows, lm_head, verifier="org/other"), TARGET, target)
    assert set(load_file(heads / "smollm2-135m-eagle3" / "model.safetensors")) == {"d2t", "norm.weight"}


def test_matrices_may_ship_in_fp8(tmp_path: Path, target: Path, heads: Path) -> None:
    rows = [0, 3, 9]
    head = trained(tmp_path / "head", rows, torch.arange(20.0).view(10, 2)[rows])
    tensors = load_file(head / "model.safetensors") | {"fc.weight": torch.tensor([[0.5, -2.0], [3.0, 1.0]])}
    save_file(tensors, head / "model.safetensors")
    (head / "README.md").write_text("its card")
    place = ship.ship(head, TARGET, target, fp8=True)
    shipped = load_file(place / "model.safetensors")
    assert set(shipped) == {"d2t", "norm.weight", "fc.weight", "fc.weight_scale"}
    assert shipped["fc.weight"].dtype == torch.float8_e4m3fn
    assert (place / "README.md").read_text() == "its card"
    assert [path.name for path in heads.iterdir()] == ["smollm2-135m-eagle3"]
