import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.drafter.vocabulary import with_vocabulary
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.errors import DrafterError

LM_HEAD = torch.arange(20.0).view(10, 2)
WORDS = DraftVocabulary(token_ids=(1, 2, 4, 8), target_size=10)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    save_file({"lm_head.weight": LM_HEAD}, folder / "model.safetensors")
    return folder


def head(folder: Path, lm_head: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"draft_vocab_size": 3, "hidden_size": 2}))
    (folder / "README.md").write_text("its card")
    d2t = torch.tensor([0, 2, 7])
    save_file({"lm_head.weight": lm_head, "d2t": d2t, "norm.weight": torch.ones(2)}, folder / "model.safetensors")
    return folder


def test_the_other_tokens_come_with_the_targets_rows(tmp_path: Path, target: Path) -> None:
    own = head(tmp_path / "head", LM_HEAD[[0, 3, 9]])
    with_vocabulary(own, target, WORDS, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert (found["d2t"] + torch.arange(4)).tolist() == [1, 2, 4, 8]
    assert found["lm_head.weight"].tolist() == LM_HEAD[[1, 2, 4, 8]].tolist()
    assert found["norm.weight"].tolist() == [1.0, 1.0]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"draft_vocab_size": 4, "hidden_size": 2}
    assert (tmp_path / "out" / "README.md").read_text() == "its card"
    with pytest.raises(DrafterError, match="is there already"):
        with_vocabulary(own, target, WORDS, tmp_path / "out")


def test_an_lm_head_that_was_trained_has_no_other_rows(tmp_path: Path, target: Path) -> None:
    with pytest.raises(DrafterError, match="its lm_head was trained"):
        with_vocabulary(head(tmp_path / "head", torch.zeros(3, 2)), target, WORDS, tmp_path / "out")
    assert not (tmp_path / "out").exists()
