"""A fake Hugging Face Hub whose branches can move. It replaces `hf_hub_download`, with a real cache on disk."""

import json
import socket

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

FIRST_COMMIT, SECOND_COMMIT = "a" * 40, "c" * 40


class MovingHub:
    """A fake of huggingface.co.

    Attributes:
        is_online: whether the hub can be reached.
        requests: (hub id, revision) of each request that reached the hub.
    """

    def __init__(self, folder, monkeypatch):
        self.is_online, self.requests = True, []
        self._cache, self._branches, self._configs = folder, {}, {}
        self._original_download = huggingface_hub.hf_hub_download
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self._download)
        monkeypatch.setattr(socket, "create_connection", self._connect)
        for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
            monkeypatch.delenv(name, raising=False)

    def push(self, model_id, commit, config, branch="main"):
        """Move a branch of a new or existing repository to a commit."""
        self._branches[model_id, branch] = commit
        self._configs[model_id, commit] = json.dumps(config)

    def _download(self, model_id, name, *, revision=None, local_files_only=False):
        if self.is_online and not local_files_only:
            self.requests.append((model_id, revision))
            commit = self._branches.get((model_id, revision or "main"), revision)
            if (model_id, commit) not in self._configs:
                raise LocalEntryNotFoundError(f"there is no {model_id} at {commit}")
            self._store(model_id, revision or "main", commit, name)
        return self._original_download(model_id, name, revision=revision, local_files_only=True)

    def _store(self, model_id, revision, commit, name):
        repository = self._cache / f"models--{model_id.replace('/', '--')}"
        snapshot, reference = repository / "snapshots" / commit, repository / "refs" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(self._configs[model_id, commit])
        if revision != commit:  # the client stores the commits of branches
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)

    def _connect(self, address, timeout):
        if not self.is_online:
            raise OSError("no route")
        return socket.socket()
