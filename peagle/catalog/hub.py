"""Reads `config.json` of a model that is not a local folder, from the Hugging Face cache, else from the hub; and says
which commit its revision is at.

Fetches nothing else; weights are vLLM's business. Without a network it says so within seconds, where the
hub's own client retries for half a minute.
"""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from peagle.errors import CatalogError

_CONNECT_TIMEOUT_S = 5
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_config(model_id: str, revision: str | None = None) -> dict[str, Any]:
    """`config.json` of a hub id.

    Raises:
        CatalogError: no network and not in the cache, no such model, or no access to it; says which.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = hf_hub_download(model_id, "config.json", revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        if not _is_reachable():
            raise _unreachable(model_id) from None
        try:
            path = hf_hub_download(model_id, "config.json", revision=revision)
        except GatedRepoError as error:
            raise CatalogError(
                f"{model_id} is gated on huggingface.co",
                hint="accept its licence there and set HF_TOKEN",
            ) from error
        except HfHubHTTPError as error:
            raise CatalogError(
                f"huggingface.co has no model {model_id}, or it is private: {error.response.status_code}",
                hint="check the id; a private model needs HF_TOKEN",
            ) from error
        except LocalEntryNotFoundError as error:
            raise _unreachable(model_id) from error
    return dict(json.loads(Path(path).read_text()))


def hub_commit(model_id: str, revision: str | None = None) -> str | None:
    """The commit that a revision (None: the main branch) of a hub id is at; None where neither hub nor cache can tell.

    The hub is asked first, as an engine that loads the branch would: what that is to be is decided here, once. The
    file is asked for by the branch's name, so that the cache remembers for later, without a network, where it was.
    """
    if is_commit(revision):
        return revision
    path = _config_path(model_id, revision, is_local=False) if _is_reachable() else None
    commit = (path or _config_path(model_id, revision, is_local=True) or Path()).parent.name
    return commit if is_commit(commit) else None


def is_commit(revision: str | None) -> bool:
    """Whether a revision names a commit, and not a branch or a tag, which move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def _config_path(model_id: str, revision: str | None, *, is_local: bool) -> Path | None:
    """Where the cache has `config.json`: SNAPSHOTS/COMMIT/config.json. None where it is not to be had."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_id, "config.json", revision=revision, local_files_only=is_local))
    except OSError:  # the client's own errors are of that kind; `hub_config` has the words for them
        return None


def _is_reachable() -> bool:
    """Whether the hub can be reached. Behind a proxy only the client itself can tell."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _unreachable(model_id: str) -> CatalogError:
    return CatalogError(
        f"{model_id} is not in the local Hugging Face cache and huggingface.co cannot be reached from here",
        hint="check the network, give a local folder, or use the embedded model: --model smollm2-135m",
    )
