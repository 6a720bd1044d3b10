import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moving_hub import FIRST, SECOND

from peagle.catalog import local, targets
from peagle.catalog.cards import lasting_name, load_catalog
from peagle.catalog.folders import folder_fingerprint
from peagle.catalog.local import local_path
from peagle.catalog.targets import context_tokens, is_hub_id, resolve_model
from peagle.errors import CatalogError, ConfigError

CONFIG: dict[str, Any] = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


def make_model(folder, **changes):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    return folder


@pytest.fixture
def hub(monkeypatch):
    """A hub that has every model."""
    monkeypatch.setattr(targets, "hub_config", lambda model_id, revision=None: CONFIG)
    monkeypatch.setattr(targets, "hub_commit", lambda model_id, revision=None: "abc123")


def test_the_embedded_model_resolves_to_its_converted_folder(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "converted")
    for module in (targets, local):
        monkeypatch.setattr(module, "ensure_embedded", lambda name, announce=None: folder)
    model = resolve_model("smollm2-135m")
    assert (model.name, model.path) == ("smollm2-135m", str(folder))
    assert model.upstream_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model.card is not None
    assert context_tokens(model) == 8192
    assert local_path("smollm2-135m") == str(folder)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "openai/gpt-oss-20b"])
def test_a_catalog_model_on_the_hub_resolves_to_its_id(hub, name):
    model = resolve_model(name)
    assert (model.name, model.path, model.fingerprint) == (
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "openai/gpt-oss-20b@abc123",
    )
    assert model.native_quantization == "mxfp4"
    assert model.upstream_id == "openai/gpt-oss-20b"
    assert local_path(name) == "openai/gpt-oss-20b"


def test_a_revision_on_a_card_is_what_an_engine_is_to_load(hub, monkeypatch):
    card = load_catalog().find("gpt-oss-20b")
    assert card is not None
    assert resolve_model("gpt-oss-20b").revision == "abc123"
    pinned = card.model_copy(update={"source": card.source.model_copy(update={"revision": "v2"})})
    monkeypatch.setattr(targets, "load_catalog", lambda: SimpleNamespace(find=lambda name: pinned))
    monkeypatch.setattr(targets, "hub_commit", lambda model_id, revision: f"where {revision} is")
    model = resolve_model("gpt-oss-20b")
    assert (model.path, model.revision) == ("openai/gpt-oss-20b", "where v2 is")
    monkeypatch.setattr(targets, "hub_commit", lambda model_id, revision: None)
    assert resolve_model("gpt-oss-20b").revision == "v2"


def test_an_engine_loads_the_commit_that_its_main_branch_was_at(moving_hub):
    moving_hub.push("org/model", FIRST, CONFIG)
    before = resolve_model("org/model")
    assert (before.revision, before.fingerprint) == (FIRST, f"org/model@{FIRST}")
    moving_hub.push("org/model", SECOND, CONFIG | {"num_hidden_layers": 31})
    after = resolve_model("org/model")
    assert (after.revision, after.config["num_hidden_layers"]) == (SECOND, 31)
    assert resolve_model("org/model", commits={"org/model": FIRST}) == before


def test_a_commit_on_a_card_is_above_what_was_decided_before(moving_hub, monkeypatch):
    moving_hub.push("openai/gpt-oss-20b", SECOND, CONFIG)
    card = load_catalog().get("gpt-oss-20b")
    pinned = card.model_copy(update={"source": card.source.model_copy(update={"revision": SECOND})})
    monkeypatch.setattr(targets, "load_catalog", lambda: SimpleNamespace(find=lambda name: pinned))
    assert resolve_model("gpt-oss-20b", commits={"openai/gpt-oss-20b": FIRST}).revision == SECOND


def test_a_hub_id_outside_the_catalog_resolves_without_a_card(hub):
    model = resolve_model("org/model")
    assert (model.name, model.path, model.card) == ("org/model", "org/model", None)
    assert model.native_quantization is None
    assert local_path("org/model") == "org/model"


def test_a_folder_resolves_to_itself(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "mine", quantization_config={"quant_method": "compressed-tensors"})
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "mine", "./mine"):
        model = resolve_model(name)
        assert (model.name, model.path, model.card) == ("mine", str(folder), None)
        assert model.native_quantization == "compressed-tensors"
        assert model.upstream_id is None
        assert local_path(name) == str(folder)
        assert lasting_name(name) == str(folder)


def test_a_name_of_the_catalog_lasts_where_a_folder_is_called_so(tmp_path, monkeypatch):
    make_model(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert [lasting_name(name) for name in ("smollm2-135m", "org/model")] == ["smollm2-135m", "org/model"]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("smollm2-153m", "no model 'smollm2-153m'", "did you mean smollm2-135m"),
        ("./missing", "no such model folder", "ORG/NAME"),
        ("/missing/folder/deep", "no such model folder", "ORG/NAME"),
    ],
)
def test_nothing_by_that_name(name, message, hint):
    with pytest.raises(CatalogError, match=message) as caught:
        resolve_model(name)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ('{"hidden_size": 4}', "has no num_hidden_layers, vocab_size"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CatalogError, match=message):
        resolve_model(str(tmp_path))


def test_a_model_without_a_context_needs_one_stated(tmp_path):
    model = resolve_model(str(make_model(tmp_path / "m", max_position_embeddings=None)))
    with pytest.raises(ConfigError, match="max_position_embeddings") as caught:
        context_tokens(model)
    assert "max_model_len" in caught.value.hint


def test_a_multimodal_model_s_context_is_its_text_part_s(tmp_path):
    model = resolve_model(str(make_model(tmp_path / "m", text_config=CONFIG | {"max_position_embeddings": 99})))
    assert context_tokens(model) == 99


def test_a_fingerprint_follows_content_and_not_place(tmp_path):
    original = make_model(tmp_path / "a")
    copy = Path(shutil.copytree(original, tmp_path / "b"))
    assert folder_fingerprint(copy) == folder_fingerprint(original)
    (copy / ".cache").write_text("hidden files do not count")
    assert folder_fingerprint(copy) == folder_fingerprint(original)


@pytest.mark.parametrize("offset", [0, 300, 256 * 1024 - 1], ids=["first", "early", "last"])
def test_a_fingerprint_changes_with_either_end_of_the_weights(tmp_path, offset):
    folder = make_model(tmp_path / "a")
    before = folder_fingerprint(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[offset] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert folder_fingerprint(folder) != before


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/m", True), ("m", False), ("./m", False), ("~/m", False), ("/m", False), ("a/b/c", False)],
)
def test_the_form_of_a_hub_id(name, expected):
    assert is_hub_id(name) is expected
