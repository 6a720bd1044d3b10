import json
import socket
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from moving_hub import FIRST, SECOND

from peagle.catalog.targets import hub_commit, hub_config
from peagle.errors import CatalogError


class Hub:
    """Stands in for the hub's client: a cache, a network that may be down, and an answer."""

    def __init__(self, tmp_path):
        self.file = tmp_path / "config.json"
        self.file.write_text(json.dumps({"hidden_size": 8}))
        self.cached = False
        self.failure: Exception | None = None
        self.connections: list[Any] = []
        self.online = True

    def download(self, model_id, name, revision=None, local_files_only=False):
        if local_files_only and not self.cached:
            raise LocalEntryNotFoundError("not cached")
        if not local_files_only and self.failure:
            raise self.failure
        return str(self.file)

    def connect(self, address, timeout):
        self.connections.append(address)
        if not self.online:
            raise OSError("no route")
        return socket.socket()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(socket, "create_connection", hub.connect)
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return hub


def test_the_cache_needs_no_network(hub):
    hub.cached, hub.online = True, False
    assert hub_config("org/m") == {"hidden_size": 8}
    assert hub.connections == []


def test_the_hub_is_asked_when_the_cache_has_nothing(hub):
    assert hub_config("org/m") == {"hidden_size": 8}
    assert hub.connections == [("huggingface.co", 443)]


def test_a_mirror_is_asked_instead_of_the_hub(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080")
    hub_config("org/m")
    assert hub.connections == [("mirror.example", 8080)]


def test_without_a_network_the_way_out_is_named(hub):
    hub.online = False
    with pytest.raises(CatalogError, match="org/m is not in the local") as caught:
        hub_config("org/m")
    assert "smollm2-135m" in caught.value.hint


def test_offline_mode_is_honoured_without_a_connection(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CatalogError, match="is not reachable"):
        hub_config("org/m")
    assert hub.connections == []


def test_behind_a_proxy_the_client_decides(hub, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    hub.online = False
    assert hub_config("org/m") == {"hidden_size": 8}
    hub.failure = LocalEntryNotFoundError("proxy says no")
    with pytest.raises(CatalogError, match="is not reachable"):
        hub_config("org/m")


class Response:
    status_code = 404
    headers: dict[str, str] = {}  # noqa: RUF012 - read by the hub's own error
    request = None


@pytest.mark.parametrize(
    ("kind", "reason", "hint"),
    [(RepositoryNotFoundError, "no model org/m", "HF_TOKEN"), (GatedRepoError, "gated", "licence")],
)
def test_what_the_hub_refuses_is_explained(hub, kind, reason, hint):
    hub.failure = kind("refused", response=Response())
    with pytest.raises(CatalogError, match=reason) as caught:
        hub_config("org/m")
    assert hint in caught.value.hint


def test_a_branch_is_at_the_commit_that_the_hub_says(moving_hub):
    moving_hub.push("org/m", FIRST, {})
    moving_hub.push("org/m", SECOND, {}, branch="v2")
    assert (hub_commit("org/m"), hub_commit("org/m", "v2")) == (FIRST, SECOND)
    moving_hub.push("org/m", SECOND, {})
    assert hub_commit("org/m") == SECOND
    assert moving_hub.asked == [("org/m", None), ("org/m", "v2"), ("org/m", None)]


def test_without_a_network_a_branch_is_where_the_cache_has_it(moving_hub):
    moving_hub.push("org/m", FIRST, {})
    hub_commit("org/m")
    moving_hub.push("org/m", SECOND, {})
    moving_hub.is_online = False
    assert hub_commit("org/m") == FIRST
    assert (hub_commit("org/m", "v2"), hub_commit("org/other")) == (None, None)


def test_a_model_that_the_hub_refuses_is_where_the_cache_has_it(hub, tmp_path):
    hub.failure = GatedRepoError("refused", response=Response())
    assert hub_commit("org/m") is None
    snapshot = tmp_path / "snapshots" / FIRST
    snapshot.mkdir(parents=True)
    hub.file, hub.cached = hub.file.rename(snapshot / "config.json"), True
    assert hub_commit("org/m") == FIRST


def test_a_commit_is_where_it_is(moving_hub):
    assert hub_commit("org/m", FIRST) == FIRST
    assert moving_hub.asked == []
