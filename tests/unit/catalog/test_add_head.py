import json

import pytest
import torch
from safetensors.torch import save_file

from peagle.catalog import add_head as module
from peagle.catalog.add_head import add_head
from peagle.catalog.cards import load_catalog
from peagle.catalog.drafters import resolve_drafter
from peagle.catalog.local import local_drafter_path
from peagle.catalog.targets import resolve_model
from peagle.errors import CatalogError, ConfigError, DrafterError

HIDDEN, VOCABULARY = 8, 64


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "My Llama"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def published_head(folder, *, base_model=None, **changes):
    """A P-EAGLE head in the hub's layout: plain Llama keys, a mask token, the whole vocabulary, own embeddings."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "ptd_token_id": VOCABULARY - 1,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    if base_model:
        (folder / "README.md").write_text(f"---\nbase_model: [{base_model}]\nlicense: mit\n---\n# Head\n")
    tensors = {f"layers.{layer}.self_attn.q_proj.weight": torch.zeros(HIDDEN, HIDDEN) for layer in range(4)}
    tensors |= {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "mask_hidden": torch.zeros(1, 3 * HIDDEN)}
    tensors |= {"embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN), "lm_head.weight": torch.zeros(64, HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_published_head_is_added_for_a_new_target(tmp_path, target, peagle_home):
    head = published_head(tmp_path / "head", base_model=str(target))
    added = add_head(head)
    assert added.path == peagle_home / "models" / "my-llama.yaml"
    assert (added.facts.method, added.facts.num_layers, added.facts.draft_vocab_size) == ("peagle", 4, VOCABULARY)
    assert added.card.heads["peagle"].licence == "mit"
    for name in ("my-llama", str(target)):
        model = resolve_model(name)
        assert (model.name, model.path) == ("my-llama", str(target))
        for platform in ("cpu", "cuda"):
            drafter = resolve_drafter("auto", model, 256, platform=platform)  # type: ignore[arg-type]
            assert drafter.spec is not None
            assert (drafter.spec.method, drafter.spec.num_speculative_tokens) == ("peagle", 5)
            assert drafter.spec.model == str(added.folder)
            assert "not measured" in drafter.note
    assert sorted(file.name for file in added.folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_copied_head_does_not_need_its_source(tmp_path, target, peagle_home):
    head = published_head(tmp_path / "head")
    added = add_head(head, target=str(target))
    for file in head.iterdir():
        file.unlink()
    assert resolve_drafter("peagle", resolve_model("my-llama"), 1).fingerprint is not None
    assert local_drafter_path(f"/another/home/heads/{added.folder.name}") == str(added.folder)


def test_card_of_a_catalog_target_keeps_its_other_fields(peagle_home, shipped_head):
    before = load_catalog().get("smollm2-135m")
    added = add_head(shipped_head)  # its target is HuggingFaceTB/SmolLM2-135M-Instruct, in the catalog as smollm2-135m
    after = load_catalog().get("smollm2-135m")
    assert after == added.card
    assert added.replaced == "smollm2-135m-peagle"
    assert after.model_dump(exclude={"heads", "speculation"}) == before.model_dump(exclude={"heads", "speculation"})
    cpu_rows = [row for row in after.speculation if row.platform == "cpu"]
    earlier_rows = [row for row in before.speculation if row.platform == "cpu"]
    assert [row.max_concurrency for row in cpu_rows] == [row.max_concurrency for row in earlier_rows]
    assert {row.method for row in cpu_rows} == {"peagle"}
    earlier_source = earlier_rows[0].source
    assert cpu_rows[0].source == f"not measured with this head; source for the previous head: {earlier_source}"
    assert add_head(shipped_head).card.speculation == after.speculation  # the prefix is not repeated for a second head


def test_k_and_maximum_concurrency_can_be_set(peagle_home, shipped_head):
    card = add_head(shipped_head, num_speculative_tokens=7, max_concurrency=16).card
    for platform in ("cpu", "cuda"):
        for concurrency, expected in ((16, ("peagle", 7)), (17, ("none", 0))):
            row = card.speculation_for(concurrency, platform)  # type: ignore[arg-type]
            assert row is not None
            assert (row.method, row.num_speculative_tokens) == expected


def test_a_head_of_another_method_is_added(tmp_path, target):
    add_head(published_head(tmp_path / "peagle"), target=str(target))
    added = add_head(published_head(tmp_path / "eagle3", ptd_token_id=None), target="my-llama")
    assert set(added.card.heads) == {"peagle", "eagle3"}
    assert added.replaced is None
    model = resolve_model("my-llama")
    auto, peagle = resolve_drafter("auto", model, 4, platform="cpu"), resolve_drafter("peagle", model, 4)
    assert auto.spec is not None
    assert peagle.spec is not None
    assert (auto.spec.method, auto.spec.num_speculative_tokens) == ("eagle3", 3)
    assert peagle.spec.method == "peagle"


def test_a_card_with_another_name_is_separate(peagle_home, monkeypatch, tmp_path, target, shipped_head):
    from peagle.catalog import targets

    shipped = load_catalog().get("smollm2-135m")
    add_head(shipped_head, name="mine")
    assert load_catalog().get("smollm2-135m") == shipped
    converted: list[str] = []
    monkeypatch.setattr(targets, "ensure_embedded", lambda name, announce=None: converted.append(name) or target)
    assert resolve_model("mine").name == "mine"
    assert converted == ["smollm2-135m"]  # both cards use one package


@pytest.mark.parametrize("name", ["add", "My Model", "../outside", "-x"])
def test_invalid_names_are_refused(peagle_home, name, shipped_head):
    with pytest.raises(CatalogError, match="cannot be called"):
        add_head(shipped_head, name=name)
    assert not peagle_home.exists()


def test_a_head_that_does_not_fit_changes_nothing(tmp_path, target, peagle_home, shipped_head):
    with pytest.raises(DrafterError, match="hidden size is 576, but the target's is 2,880"):
        add_head(shipped_head, target="gpt-oss-20b")
    with pytest.raises(DrafterError, match="has 2 layers, but the weights have"):
        add_head(published_head(tmp_path / "a", num_hidden_layers=2), target=str(target))
    with pytest.raises(DrafterError, match="names none of P-EAGLE, EAGLE-3, DFlash and DSpark"):
        add_head(target, target=str(target))
    with pytest.raises(ConfigError, match="K must be at least 1"):
        add_head(shipped_head, num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="max_concurrency must be at least 1"):
        add_head(shipped_head, max_concurrency=0)
    assert not peagle_home.exists()


def test_head_without_an_existing_target_is_refused(tmp_path):
    with pytest.raises(DrafterError, match="does not name its target model") as no_target:
        add_head(published_head(tmp_path / "silent"))
    with pytest.raises(CatalogError, match="is for /gone/model: no such model folder") as missing:
        add_head(published_head(tmp_path / "gone", base_model="/gone/model"))
    assert "--model" in no_target.value.hint
    assert "--model" in missing.value.hint


def test_sizes_missing_on_the_card_are_read_from_the_target(tmp_path, target, monkeypatch, shipped_head):
    added = add_head(published_head(tmp_path / "head"), target=str(target))
    unknown = added.card.architecture.model_copy(update={"hidden_size": None})
    incomplete = added.card.model_copy(update={"architecture": unknown})
    monkeypatch.setattr(module, "load_catalog", lambda: load_catalog().__class__({"my-llama": incomplete}))
    with pytest.raises(DrafterError, match="hidden size is 576, but the target's is 8"):
        add_head(shipped_head, target="my-llama")
