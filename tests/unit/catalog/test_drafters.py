import json

import pytest
import torch
from moving_hub import FIRST_COMMIT, SECOND_COMMIT
from safetensors.torch import save_file

from peagle.catalog import drafters
from peagle.catalog.cards import ModelCard, load_catalog
from peagle.catalog.drafters import find_head, resolve_drafter
from peagle.catalog.targets import ResolvedModel
from peagle.errors import DrafterError

CONFIG = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


def make_head(folder, **changes):
    head = {
        "speculators_model_type": "peagle",
        "transformer_layer_config": {"hidden_size": 576, "vocab_size": 49152},
        "eagle_aux_hidden_state_layer_ids": [2, 15, 29],
        "mask_token_id": 0,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(head | changes))
    return folder


def make_card(**changes):
    """Return the embedded model's card with other heads and speculation rows."""
    rows = [
        {"platform": "cpu", "max_concurrency": 3, "method": "peagle", "num_speculative_tokens": 3},
        {"platform": "cpu", "max_concurrency": 64, "method": "none", "num_speculative_tokens": 0},
    ]
    heads = {
        "peagle": {"kind": "shipped", "id": "m-peagle", "max_speculative_tokens": 8, "source": "s"},
        "eagle3": {"kind": "huggingface", "published": False, "note": "it is secret", "source": "s"},
    }
    values = load_catalog().get("smollm2-135m").model_dump()
    rows = [row | {"source": "measured here"} for row in rows]
    return ModelCard.model_validate(values | {"heads": heads, "speculation": rows} | changes)


@pytest.fixture
def shipped_folder(tmp_path, monkeypatch):
    """The folder of the card's P-EAGLE head."""
    monkeypatch.setattr(drafters, "HEADS_FOLDER", tmp_path / "heads")
    return make_head(tmp_path / "heads" / "m-peagle")


@pytest.fixture
def model():
    return ResolvedModel(name="m", path="/m", card=make_card(), fingerprint="f", config=CONFIG)


def test_auto_uses_the_recommendation(model, shipped_folder):
    drafter = resolve_drafter("auto", model, 2, platform="cpu")
    assert drafter.spec is not None
    assert (drafter.spec.method, drafter.spec.model) == ("peagle", str(shipped_folder))
    assert drafter.spec.num_speculative_tokens == 3
    assert drafter.name == "m-peagle"
    assert "measured here" in drafter.note


@pytest.mark.parametrize(
    ("concurrency", "platform", "reason"),
    [
        (4, "cpu", "costs more than it saves (measured here)"),
        (65, "cpu", "no measurements for 65 concurrent requests on cpu"),
        (1, "cuda", "no measurements for 1 concurrent requests on cuda"),
    ],
)
def test_auto_without_a_recommendation_does_not_draft(model, shipped_folder, concurrency, platform, reason):
    drafter = resolve_drafter("auto", model, concurrency, platform=platform)
    assert drafter.spec is None
    assert reason in drafter.note


def test_auto_without_the_shipped_head_does_not_draft(model, tmp_path, monkeypatch):
    monkeypatch.setattr(drafters, "HEADS_FOLDER", tmp_path / "nothing")
    drafter = resolve_drafter("auto", model, 1)
    assert drafter.spec is None
    assert "missing from this installation" in drafter.note


def test_note_warns_of_k_above_the_trained_depth(model, shipped_folder):
    assert "K=9 exceeds the 8" in resolve_drafter("auto", model, 1, num_speculative_tokens=9).note


@pytest.mark.parametrize(
    ("changes", "k"),
    [
        ({}, 5),
        ({"speculators_model_type": "eagle3", "mask_token_id": None}, 3),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}}, 6),
    ],
    ids=["default of P-EAGLE", "default of EAGLE-3", "in the head's config.json"],
)
def test_head_folder_without_measurements_has_a_default_k(tmp_path, changes, k):
    model = ResolvedModel(name="mine", path="/m", card=None, fingerprint="f", config=CONFIG)
    head = make_head(tmp_path / "my-head", **changes)
    drafter = resolve_drafter(str(head), model, 1)
    assert drafter.spec is not None
    assert (drafter.name, drafter.spec.num_speculative_tokens) == ("my-head", k)


BLOCK_HEAD = {
    "speculators_model_type": "dflash",
    "block_size": 8,
    "eagle_aux_hidden_state_layer_ids": None,
    "aux_hidden_state_layer_ids": [2, 15, 29],
}


def test_block_size_limits_k(tmp_path):
    model = ResolvedModel(name="mine", path="/m", card=None, fingerprint="f", config=CONFIG)
    head = make_head(tmp_path / "my-head", **BLOCK_HEAD)
    drafter = resolve_drafter(str(head), model, 1, num_speculative_tokens=7).spec
    assert drafter is not None
    assert (drafter.method, drafter.num_speculative_tokens) == ("dflash", 7)
    with pytest.raises(DrafterError, match="K=8 exceeds the 7 tokens that my-head drafts in one block"):
        resolve_drafter(str(head), model, 1, num_speculative_tokens=8)


def test_block_heads_with_mixed_attention_need_a_gpu(tmp_path):
    model = ResolvedModel(name="mine", path="/m", card=None, fingerprint="f", config=CONFIG)
    layer = {**CONFIG, "layer_types": ["sliding_attention", "full_attention"]}
    head = make_head(tmp_path / "my-head", **BLOCK_HEAD, transformer_layer_config=layer)
    assert resolve_drafter(str(head), model, 1, platform="cuda").spec is not None
    with pytest.raises(DrafterError, match="only on GPUs"):
        resolve_drafter(str(head), model, 1, platform="cpu")


def test_retraining_a_head_changes_its_fingerprint(model, tmp_path):
    head = make_head(tmp_path / "my-head")
    save_file({"norm.weight": torch.zeros(1)}, head / "model.safetensors")
    before = resolve_drafter(str(head), model, 1).fingerprint
    save_file({"norm.weight": torch.ones(1)}, head / "model.safetensors")
    assert resolve_drafter(str(head), model, 1).fingerprint != before


def test_head_on_the_hub_is_pinned_to_a_commit(model, moving_hub, tmp_path):
    head = {"hidden_size": 576, "vocab_size": 49152, "ptd_token_id": 7}
    moving_hub.push("org/head", FIRST_COMMIT, head)
    before = resolve_drafter("org/head", model, 1)
    assert before.spec is not None
    assert (before.spec.model, before.spec.revision) == ("org/head", FIRST_COMMIT)
    assert before.fingerprint == f"org/head@{FIRST_COMMIT}"
    moving_hub.push("org/head", SECOND_COMMIT, head)
    after = resolve_drafter("org/head", model, 1)
    assert after.spec is not None
    assert after.spec.revision == SECOND_COMMIT
    assert resolve_drafter("org/head", model, 1, commits={"org/head": FIRST_COMMIT}) == before
    local_drafter = resolve_drafter(str(make_head(tmp_path / "mine")), model, 1)
    assert local_drafter.spec is not None
    assert local_drafter.spec.revision is None


def test_method_without_a_head_on_the_card_is_refused():
    card = make_card(heads={}, speculation=[])
    model = ResolvedModel(name="m", path="/m", card=card, fingerprint="f", config=CONFIG)
    with pytest.raises(DrafterError, match="the catalog has no peagle head for m") as caught:
        resolve_drafter("peagle", model, 1)
    assert "qwen3-coder-30b-a3b-instruct" in caught.value.hint


@pytest.mark.parametrize("name", ["atuo", "./missing", "/a/b/c"])
def test_unknown_drafters_are_refused(model, name):
    with pytest.raises(DrafterError, match="no such drafter") as caught:
        resolve_drafter(name, model, 1)
    assert "auto, none, peagle" in caught.value.hint


def test_heads_of_other_models_are_refused(model, tmp_path):
    head = make_head(tmp_path / "other", transformer_layer_config={"hidden_size": 2880, "vocab_size": 49152})
    with pytest.raises(DrafterError, match=r"2,880.*576"):
        resolve_drafter(str(head), model, 1)


@pytest.mark.parametrize("name", ["smollm2-135m-peagle", "smollm2-135m-eagle3", "P-EAGLE", "EAGLE-3"])
def test_drafter_names_in_reports_are_accepted(name, monkeypatch):
    monkeypatch.setattr(drafters, "complete_head", lambda folder: folder)
    card = load_catalog().get("smollm2-135m")
    model = ResolvedModel(name="smollm2-135m", path="/m", card=card, fingerprint="f", config=CONFIG)
    method = "peagle" if "peagle" in name.lower().replace("-", "") else "eagle3"
    by_method, by_name = resolve_drafter(method, model, 1), resolve_drafter(name, model, 1)
    assert by_name == by_method
    assert resolve_drafter(str(by_name.name), model, 1) == by_method  # reports print this name


@pytest.mark.parametrize("suffix", ["", "-long-context"])
def test_hub_head_is_found_without_its_organisation(suffix):
    name = f"Qwen3-Coder-30B-A3B-Instruct-P-EAGLE{suffix}"
    assert find_head(name) == find_head(f"amazon/{name}") == f"amazon/{name}"


def test_folder_has_priority_over_a_head_name_but_not_over_a_method(tmp_path, monkeypatch):
    monkeypatch.setattr(drafters, "complete_head", lambda folder: folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-peagle").mkdir()
    (tmp_path / "peagle").mkdir()
    assert find_head("smollm2-135m-peagle") == "smollm2-135m-peagle"
    card = load_catalog().get("smollm2-135m")
    model = ResolvedModel(name="smollm2-135m", path="/m", card=card, fingerprint="f", config=CONFIG)
    assert resolve_drafter("peagle", model, 1).name == "smollm2-135m-peagle"
