import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from moving_hub import FIRST_COMMIT, SECOND_COMMIT

from peagle.catalog import local, targets
from peagle.catalog.cards import absolute_model_name, load_catalog
from peagle.catalog.folders import folder_fingerprint
from peagle.catalog.local import local_drafter_path
from peagle.catalog.targets import context_tokens, hub_commit, hub_config, resolve_model
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
    """Replaces the hub: every model has `CONFIG` and the commit abc123."""
    monkeypatch.setattr(targets, "hub_config", lambda model_id, revision=None: CONFIG)
    monkeypatch.setattr(targets, "hub_commit", lambda model_id, revision=None: "abc123")


def test_embedded_model_resolves_to_its_converted_folder(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "converted")
    for module in (targets, local):
        monkeypatch.setattr(module, "ensure_embedded", lambda name, announce=None: folder)
    model = resolve_model("smollm2-135m")
    assert (model.name, model.path) == ("smollm2-135m", str(folder))
    assert model.upstream_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model.card is not None
    assert context_tokens(model) == 8192
    assert local_drafter_path("smollm2-135m") == str(folder)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "openai/gpt-oss-20b"])
def test_catalog_model_on_the_hub_resolves_to_its_id(hub, name):
    model = resolve_model(name)
    assert (model.name, model.path, model.fingerprint) == (
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "openai/gpt-oss-20b@abc123",
    )
    assert model.native_quantization == "mxfp4"
    assert model.upstream_id == "openai/gpt-oss-20b"
    assert local_drafter_path(name) == "openai/gpt-oss-20b"


def test_revision_of_the_card_is_used(hub, monkeypatch):
    card = load_catalog().find("gpt-oss-20b")
    assert card is not None
    assert resolve_model("gpt-oss-20b").revision == "abc123"
    pinned = card.model_copy(update={"source": card.source.model_copy(update={"revision": "v2"})})
    monkeypatch.setattr(targets, "load_catalog", lambda: SimpleNamespace(find=lambda name: pinned))
    monkeypatch.setattr(targets, "hub_commit", lambda model_id, revision: f"commit of {revision}")
    model = resolve_model("gpt-oss-20b")
    assert (model.path, model.revision) == ("openai/gpt-oss-20b", "commit of v2")
    monkeypatch.setattr(targets, "hub_commit", lambda model_id, revision: None)
    assert resolve_model("gpt-oss-20b").revision == "v2"


def test_models_are_pinned_to_a_commit(moving_hub):
    moving_hub.push("org/model", FIRST_COMMIT, CONFIG)
    before = resolve_model("org/model")
    assert (before.revision, before.fingerprint) == (FIRST_COMMIT, f"org/model@{FIRST_COMMIT}")
    moving_hub.push("org/model", SECOND_COMMIT, CONFIG | {"num_hidden_layers": 31})
    after = resolve_model("org/model")
    assert (after.revision, after.config["num_hidden_layers"]) == (SECOND_COMMIT, 31)
    assert resolve_model("org/model", commits={"org/model": FIRST_COMMIT}) == before


def test_hub_id_outside_the_catalog_resolves_without_a_card(hub):
    model = resolve_model("org/model")
    assert (model.name, model.path, model.card) == ("org/model", "org/model", None)
    assert model.native_quantization is None
    assert local_drafter_path("org/model") == "org/model"


def test_model_folder_resolves_by_name_and_path(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "mine", quantization_config={"quant_method": "compressed-tensors"})
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "mine", "./mine"):
        model = resolve_model(name)
        assert (model.name, model.path, model.card) == ("mine", str(folder), None)
        assert model.native_quantization == "compressed-tensors"
        assert model.upstream_id is None
        assert local_drafter_path(name) == str(folder)
        assert absolute_model_name(name) == str(folder)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("smollm2-153m", "no model 'smollm2-153m'", "did you mean smollm2-135m"),
        ("./missing", "no such model folder", "ORG/NAME"),
        ("/missing/folder/deep", "no such model folder", "ORG/NAME"),
    ],
)
def test_unknown_names_are_refused(name, message, hint):
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
def test_folder_without_a_valid_config_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CatalogError, match=message):
        resolve_model(str(tmp_path))


def test_model_without_a_context_length_is_refused(tmp_path):
    model = resolve_model(str(make_model(tmp_path / "m", max_position_embeddings=None)))
    with pytest.raises(ConfigError, match="max_position_embeddings") as caught:
        context_tokens(model)
    assert "max_model_len" in caught.value.hint


def test_fingerprint_depends_on_content_but_not_on_path_or_hidden_files(tmp_path):
    original = make_model(tmp_path / "a")
    copy = Path(shutil.copytree(original, tmp_path / "b"))
    assert folder_fingerprint(copy) == folder_fingerprint(original)
    (copy / ".cache").write_text("hidden files do not count")
    assert folder_fingerprint(copy) == folder_fingerprint(original)


@pytest.mark.parametrize("offset", [0, 300, 256 * 1024 - 1], ids=["first byte", "near the start", "last byte"])
def test_fingerprint_depends_on_both_ends_of_a_file(tmp_path, offset):
    folder = make_model(tmp_path / "a")
    before = folder_fingerprint(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[offset] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert folder_fingerprint(folder) != before


class FakeHub:
    """A fake hub client. The file might be cached, and the network might be down."""

    def __init__(self, tmp_path):
        self.file = tmp_path / "config.json"
        self.file.write_text(json.dumps({"hidden_size": 8}))
        self.is_cached = False
        self.failure: Exception | None = None
        self.connections: list[Any] = []
        self.is_online = True

    def download(self, model_id, name, revision=None, local_files_only=False):
        if local_files_only and not self.is_cached:
            raise LocalEntryNotFoundError("not cached")
        if not local_files_only and self.failure:
            raise self.failure
        return str(self.file)

    def connect(self, address, timeout):
        self.connections.append(address)
        if not self.is_online:
            raise OSError("no route")
        return socket.socket()


@pytest.fixture
def hub_client(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(socket, "create_connection", hub.connect)
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return hub


def test_cached_config_needs_no_network(hub_client):
    hub_client.is_cached, hub_client.is_online = True, False
    assert hub_config("org/m") == {"hidden_size": 8}
    assert hub_client.connections == []


def test_mirror_is_contacted_instead_of_the_hub(hub_client, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080")
    hub_config("org/m")
    assert hub_client.connections == [("mirror.example", 8080)]


def test_without_a_network_the_hint_names_the_embedded_model(hub_client):
    hub_client.is_online = False
    with pytest.raises(CatalogError, match="org/m is not in the local") as caught:
        hub_config("org/m")
    assert "smollm2-135m" in caught.value.hint


def test_with_a_proxy_no_direct_connection_is_needed(hub_client, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    hub_client.is_online = False
    assert hub_config("org/m") == {"hidden_size": 8}
    hub_client.failure = LocalEntryNotFoundError("refused by the proxy")
    with pytest.raises(CatalogError, match="is not reachable"):
        hub_config("org/m")


class Response:
    status_code = 404
    headers: dict[str, str] = {}  # noqa: RUF012 - read by the hub's error classes
    request = None


@pytest.mark.parametrize(
    ("error_type", "message", "hint"),
    [(RepositoryNotFoundError, "no model org/m", "HF_TOKEN"), (GatedRepoError, "gated", "licence")],
)
def test_hub_errors_have_hints(hub_client, error_type, message, hint):
    hub_client.failure = error_type("refused", response=Response())
    with pytest.raises(CatalogError, match=message) as caught:
        hub_config("org/m")
    assert hint in caught.value.hint


def test_commits_of_branches_come_from_the_hub(moving_hub):
    moving_hub.push("org/m", FIRST_COMMIT, {})
    moving_hub.push("org/m", SECOND_COMMIT, {}, branch="v2")
    assert (hub_commit("org/m"), hub_commit("org/m", "v2")) == (FIRST_COMMIT, SECOND_COMMIT)
    moving_hub.push("org/m", SECOND_COMMIT, {})
    assert hub_commit("org/m") == SECOND_COMMIT
    assert moving_hub.requests == [("org/m", None), ("org/m", "v2"), ("org/m", None)]


def test_commits_of_branches_come_from_the_cache_offline(moving_hub):
    moving_hub.push("org/m", FIRST_COMMIT, {})
    hub_commit("org/m")
    moving_hub.push("org/m", SECOND_COMMIT, {})
    moving_hub.is_online = False
    assert hub_commit("org/m") == FIRST_COMMIT
    assert (hub_commit("org/m", "v2"), hub_commit("org/other")) == (None, None)
