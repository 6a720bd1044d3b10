import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.catalog import shipped_heads
from peagle.catalog.shipped_heads import complete_head, find_shipped_head, without_rows
from peagle.errors import ConfigError, DrafterError

LM_HEAD_ROWS = (1, 4, 5, 9)


@pytest.fixture
def target(tmp_path, monkeypatch):
    """An embedded target of ten tokens with tied embeddings."""
    folder = tmp_path / "targets" / "tiny-0123"
    folder.mkdir(parents=True)
    embedding = torch.arange(20, dtype=torch.bfloat16).view(10, 2)
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(shipped_heads, "embedded_folder", lambda name: folder)
    monkeypatch.setattr(shipped_heads, "ensure_embedded", lambda name: folder)
    return folder


@pytest.fixture
def trained(tmp_path, target):
    """A head as `peagle train --no-train-lm-head` saves it."""
    folder = tmp_path / "trained" / "m-peagle"
    folder.mkdir(parents=True)
    verifier = {"name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    (folder / "config.json").write_text(json.dumps({"speculators_config": {"verifier": verifier}}))
    (folder / "README.md").write_text("its card")
    rows = load_file(target / "model.safetensors")["model.embed_tokens.weight"][list(LM_HEAD_ROWS)]
    d2t = torch.tensor(LM_HEAD_ROWS) - torch.arange(len(LM_HEAD_ROWS))
    save_file({"fc.weight": torch.ones(2, 6), "lm_head.weight": rows, "d2t": d2t}, folder / "model.safetensors")
    return folder


@pytest.fixture
def shipped(tmp_path, trained, target, monkeypatch):
    """The same head as shipped in the package."""
    folder = tmp_path / "package" / "heads" / trained.name
    folder.parent.mkdir(parents=True)
    without_rows(trained, target, folder)
    monkeypatch.setattr(shipped_heads, "HEADS_FOLDER", folder.parent)
    return folder


def test_lm_head_rows_of_a_shipped_head_are_restored(trained, shipped, tmp_path):
    assert set(load_file(shipped / "model.safetensors")) == {"fc.weight", "d2t"}
    full_head = complete_head(shipped)
    assert full_head.parent == tmp_path / "home" / "heads"
    tensors = load_file(full_head / "model.safetensors")
    assert tensors.keys() == load_file(trained / "model.safetensors").keys()
    assert all(torch.equal(tensors[name], value) for name, value in load_file(trained / "model.safetensors").items())
    assert sorted(path.name for path in full_head.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in full_head.parent.iterdir()] == [full_head.name]


def test_fp8_matrices_of_a_shipped_head_become_bf16(shipped):
    tensors, config = load_file(shipped / "model.safetensors"), json.loads((shipped / "config.json").read_text())
    stored = torch.tensor([[112.0, -448.0], [448.0, 15.0]]).to(torch.float8_e4m3fn)
    quantised = {"fc.weight": stored, "fc.weight_scale": torch.tensor([[2 / 448], [1.0]])}
    save_file(tensors | quantised, shipped / "model.safetensors")
    (shipped / "config.json").write_text(json.dumps(config | {"quantization_config": {"format": "float-quantized"}}))
    full_head = complete_head(shipped)
    completed = load_file(full_head / "model.safetensors")
    assert set(completed) == {"fc.weight", "lm_head.weight", "d2t"}
    assert completed["fc.weight"].dtype == torch.bfloat16
    assert completed["fc.weight"].tolist() == [[0.5, -2.0], [448.0, 15.0]]
    assert json.loads((full_head / "config.json").read_text()) == config


def test_a_shipped_head_is_completed_once(shipped):
    before = (complete_head(shipped) / "model.safetensors").stat()
    assert (complete_head(shipped) / "model.safetensors").stat() == before


def test_a_retrained_head_has_another_folder(shipped):
    before = complete_head(shipped)
    save_file(load_file(shipped / "model.safetensors") | {"norm": torch.ones(2)}, shipped / "model.safetensors")
    assert complete_head(shipped) != before


def test_a_complete_head_is_used_in_place(trained, tmp_path):
    assert complete_head(trained) == trained
    assert not (tmp_path / "home").exists()


def test_both_folder_names_of_a_shipped_head_are_found(shipped):
    full_head = complete_head(shipped)
    assert find_shipped_head(shipped.name) == full_head
    assert find_shipped_head(full_head.name) == full_head
    assert find_shipped_head("another") is None


def test_trained_lm_head_rows_cannot_be_omitted(trained, target, tmp_path):
    tensors = load_file(trained / "model.safetensors")
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, trained / "model.safetensors")
    with pytest.raises(DrafterError, match="differs from the target's") as caught:
        without_rows(trained, target, tmp_path / "shipped")
    assert "--no-train-lm-head" in caught.value.hint
    assert not (tmp_path / "shipped").exists()


def test_rows_of_another_target_cannot_be_restored(shipped):
    (shipped / "config.json").write_text("{}")
    with pytest.raises(DrafterError, match="unless the target is embedded"):
        complete_head(shipped)


def test_an_unwritable_home_is_an_error(shipped, tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        complete_head(shipped)
    assert "PEAGLE_HOME" in caught.value.hint
