"""A target's weights by name, whatever stands before the names and however many files there are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter.target import TargetWeights, read_architecture
from peagle.errors import ConfigError


def _split(target: Path, folder: Path, prefix: str, *without: str) -> TargetWeights:
    """The target's weights under other names, in two files."""
    weights = load_file(target / "model.safetensors")
    renamed = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in weights.items()}
    renamed["vision.embed_tokens.weight"] = torch.zeros(4, 4)
    renamed = {name: tensor for name, tensor in renamed.items() if not name.endswith(without)}
    for number, part in enumerate((sorted(renamed)[::2], sorted(renamed)[1::2])):
        save_file({name: renamed[name] for name in part}, folder / f"model-{number}.safetensors")
    return TargetWeights(folder, read_architecture(target))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_names_are_found_behind_any_prefix(tmp_path: Path, target: Path, prefix: str) -> None:
    weights, expected = _split(target, tmp_path, prefix), load_file(target / "model.safetensors")
    torch.testing.assert_close(weights.final_norm(), expected["model.norm.weight"].float())
    name = "layers.3.mlp.up_proj.weight"
    torch.testing.assert_close(weights[name], expected[f"model.{name}"])
    assert weights.shape(name) == [64, 32]
    assert "mlp.up_proj.weight" in weights.names_in_layer(3)
    assert not weights.names_in_layer(4)


def test_a_folder_without_the_vocabularys_embeddings_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"have no embed_tokens\.weight of 96 x 32"):
        _split(target, tmp_path, "model.", "model.embed_tokens.weight")


def test_an_lm_head_of_its_own_must_be_there(tmp_path: Path, target: Path) -> None:
    config = (target / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"no lm_head\.weight of 96 x 32"):
        TargetWeights(target, read_architecture(tmp_path))


def test_a_norm_that_is_not_there_is_named(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"have no model\.norm\.weight"):
        _split(target, tmp_path, "model.", "model.norm.weight").final_norm()
