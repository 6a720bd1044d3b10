import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.drafter.average import average
from peagle.errors import DrafterError


def head(folder: Path, weight: float, *, d2t: list[int], layers: int = 1) -> Path:
    folder.mkdir()
    layer = {"hidden_size": 2, "vocab_size": 10, "num_hidden_layers": layers, "_name_or_path": folder.name}
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": len(d2t), "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(f"card of {weight}")
    weights = {"norm.weight": torch.full((2,), weight, dtype=torch.bfloat16), "d2t": torch.tensor(d2t)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_average_has_the_mean_of_the_weights_and_the_last_ones_vocabulary_and_card(tmp_path: Path) -> None:
    heads = [head(tmp_path / str(weight), weight, d2t=[0, 3]) for weight in (1.0, 2.0, 6.0)]
    average(heads, tmp_path / "mean")
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert found["norm.weight"].dtype == torch.bfloat16
    assert found["norm.weight"].tolist() == [3.0, 3.0]
    assert found["d2t"].tolist() == [0, 3]
    assert (tmp_path / "mean" / "README.md").read_text() == "card of 6.0"
    with pytest.raises(DrafterError, match="is there already"):
        average(heads, tmp_path / "mean")


def test_what_is_equal_stays_so_to_the_bit(tmp_path: Path) -> None:
    heads = [head(tmp_path / name, -0.0, d2t=[0, 3]) for name in ("one", "other")]
    average(heads, tmp_path / "mean")
    assert load_file(tmp_path / "mean" / "model.safetensors")["norm.weight"].signbit().all()


def test_heads_that_differ_have_no_average(tmp_path: Path) -> None:
    one = head(tmp_path / "one", 1.0, d2t=[0, 3])
    with pytest.raises(DrafterError, match="different draft vocabularies"):
        average([one, head(tmp_path / "other", 1.0, d2t=[0, 4])], tmp_path / "mean")
    with pytest.raises(DrafterError, match=r"one/config\.json is not that of"):
        average([one, head(tmp_path / "deep", 1.0, d2t=[0, 3], layers=2)], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
