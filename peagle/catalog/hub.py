"""Reads `config.json` of a model that is not a local folder: from the Hugging Face cache, else from the hub.

Fetches nothing else; weights are vLLM's business. Without a network it says so within seconds, where the
hub's own client retries for half a minute.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from peagle.errors import CatalogError

_CONNECT_TIMEOUT_S = 5


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
        _require_network(model_id)
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


def hub_commit(model_id: str, revision: str | None = None) -> str:
    """The cached commit of a hub id, or the revision's name where none is cached; for fingerprints."""
    from huggingface_hub.constants import HF_HUB_CACHE

    reference = Path(HF_HUB_CACHE) / f"models--{model_id.replace('/', '--')}" / "refs" / (revision or "main")
    try:
        return reference.read_text().strip()
    except OSError:
        return revision or "main"


def _require_network(model_id: str) -> None:
    """Fail at once where the hub cannot be reached. Behind a proxy only the client itself can tell."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise _unreachable(model_id)
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _unreachable(model_id) from error


def _unreachable(model_id: str) -> CatalogError:
    return CatalogError(
        f"{model_id} is not in the local Hugging Face cache and huggingface.co cannot be reached from here",
        hint="check the network, give a local folder, or use the embedded model: --model smollm2-135m",
    )
