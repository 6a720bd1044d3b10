"""Resolve a model's name: catalog name, folder, `s3://` folder or hub id.

`config.json` of a hub model comes from the Hugging Face cache, else from the hub.

It reads configurations, never weights. Drafters are resolved in `drafters.py`; `local.py` has what a node needs.

Nothing else is fetched from the hub; weights are vLLM's business. Without a network it says so within seconds, where
the hub's own client retries for half a minute.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from peagle.catalog.cards import ModelCard, load_catalog
from peagle.catalog.embedded import EMBEDDED_TARGETS, embedded_name, ensure_embedded
from peagle.catalog.fetched import ensure_fetched, fetch, find_stored, is_stored
from peagle.catalog.folders import folder_fingerprint, read_config
from peagle.catalog.int8 import require_convertible
from peagle.engine.checkpoint import published_kv_cache, published_method, require_computable
from peagle.engine.keys import TargetKeys, extra_arguments, widest_head
from peagle.engine.precision import Precision, resolve_precision
from peagle.errors import CatalogError, ConfigError
from peagle.hardware import Hardware
from peagle.private import user_path

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
    """The commit of a hub id's revision (None: the main branch).

    None where neither hub nor cache can tell.

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
    """Where the cache has `config.json`: SNAPSHOTS/COMMIT/config.json.

    None where it is not to be had.
    """
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


NO_COMMITS: Mapping[str, str] = MappingProxyType({})
_REQUIRED_KEYS = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A target that an engine can load.

    Attributes:
        name: what to call it in reports.
        path: a local folder, a hub id that vLLM downloads, or an `s3://` folder that each node fetches (`fetched.py`).
        card: its catalog card, None outside the catalog.
        fingerprint: changes when the weights or the configuration do.
        config: its `config.json`.
        revision: of a hub id, what an engine is to load: the commit that the card's revision, or the main branch, is
            at; where that cannot be told, the card's own, None for the latest. Of an `s3://` folder, its listing's.
        weights_bytes: the size of its weights in a store; None elsewhere.
    """

    name: str
    path: str
    card: ModelCard | None
    fingerprint: str
    config: Mapping[str, Any]
    revision: str | None = None
    weights_bytes: int | None = None

    @property
    def upstream_id(self) -> str | None:
        """Its id on the hub, by which an engine elsewhere finds it.

        None for a folder of the user's, on a disk or in a store.
        """
        if self.card is not None and self.card.source.kind == "package":
            return EMBEDDED_TARGETS[embedded_name(self.card.source.id)].upstream_id
        return self.path if is_hub_id(self.path) else None

    @property
    def vocab_size(self) -> int | None:
        """Rows of its embedding, so the largest token id plus one."""
        size: int | None = (self.config.get("text_config") or self.config).get("vocab_size")
        return size

    @property
    def native_quantization(self) -> str | None:
        """How the checkpoint is quantised as published, None when it is not."""
        return published_method(self.config) or (self.card.precision.native_quantization if self.card else None)


def resolve_model(
    name: str, *, commits: Mapping[str, str] = NO_COMMITS, announce: Callable[[str], None] = lambda message: None
) -> ResolvedModel:
    """The model that `name` stands for.

    A target inside a package is converted on first use (half a minute).

    Args:
        name: an `s3://` folder; or catalog name, local folder or hub id, looked for in this order.
        commits: by hub id, what was decided before and holds, wherever its branch is now.
        announce: is told, in a sentence, when something slow begins.

    Raises:
        CatalogError: nothing by that name; names the nearest.
        StorageError, CapacityError: the files beside the weights of an `s3://` folder cannot be fetched.
    """
    if is_stored(name):
        return _stored_model(name)
    catalog = load_catalog()
    folder = user_path(name)
    card = catalog.find(name) or (catalog.find(str(folder.resolve())) if folder.exists() else None)
    if card is not None and card.source.kind == "package":
        return _local_model(card.name, ensure_embedded(embedded_name(card.source.id), announce=announce), card)
    if card is not None and card.source.kind == "folder":
        return _local_model(card.name, Path(card.source.id), card)
    if card is not None:
        return _hub_model(card.name, card.source.id, card.source.revision, card, commits)
    if folder.exists():
        return _local_model(folder.resolve().name, folder.resolve(), None)
    if is_hub_id(name):
        return _hub_model(name, name, None, None, commits)
    if "/" in name or name.startswith((".", "~")):
        raise CatalogError(f"no such model folder: {name}", hint="a hub id has the form ORG/NAME")
    raise catalog.unknown(name)


def context_tokens(model: ResolvedModel) -> int:
    """The most prompt and output tokens of one request, by the model's own config.

    Raises:
        ConfigError: the configuration does not say.
    """
    tokens = (model.config.get("text_config") or model.config).get("max_position_embeddings")
    if not isinstance(tokens, int):
        raise ConfigError(f"{model.name}: config.json states no max_position_embeddings", hint="set max_model_len")
    return tokens


def max_model_len(model: ResolvedModel, asked: int | None) -> int:
    """The context of an engine: as asked for, else the model's own.

    Raises:
        ConfigError: more than the model's own was asked for, or that is not known.
    """
    own = context_tokens(model)
    if asked is not None and asked > own:
        raise ConfigError(f"max_model_len is {asked}; the context of {model.name} has {own} tokens")
    return asked or own


def name_of(model: str) -> str:
    """A model's name for people: of a path the folder's name.

    >>> name_of("smollm2-135m"), name_of("org/model"), name_of("/srv/models/mine/"), name_of("./mine")
    ('smollm2-135m', 'org/model', 'mine', 'mine')
    """
    return model if is_hub_id(model) else Path(model).name or model


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ORG/NAME."""
    owner, _, rest = name.partition("/")
    return bool(owner and rest) and "/" not in rest and not name.startswith((".", "~"))


def fetched_model(model: ResolvedModel, announce: Callable[[str], None]) -> ResolvedModel:
    """The model with its weights on this node, for a command whose engines run here.

    Only a model in a store is fetched.

    Raises:
        StorageError, CapacityError: it cannot be fetched.
    """
    if not is_stored(model.path):
        return model
    folder = ensure_fetched(model.path, model.revision, weights=True, announce=announce)
    return replace(model, path=str(folder), revision=None)


def _local_model(name: str, folder: Path, card: ModelCard | None) -> ResolvedModel:
    fingerprint, config = folder_fingerprint(folder), _checked_config(folder, str(folder))
    return ResolvedModel(name=name, path=str(folder), card=card, fingerprint=fingerprint, config=config)


def _stored_model(url: str) -> ResolvedModel:
    stored = find_stored(url)
    folder = fetch(stored)
    return ResolvedModel(
        name=stored.at.name,
        path=str(stored.at),
        card=None,
        fingerprint=stored.fingerprint(),
        config=_checked_config(folder, str(stored.at)),
        revision=stored.revision,
        weights_bytes=stored.weights_bytes,
    )


def _checked_config(folder: Path, where: str) -> dict[str, Any]:
    config = read_config(folder, CatalogError)
    text = config.get("text_config") or config
    if missing := [key for key in _REQUIRED_KEYS if key not in text]:
        raise CatalogError(f"{where}/config.json lacks {', '.join(missing)}: is it a language model?")
    return config


def _hub_model(
    name: str, model_id: str, pinned: str | None, card: ModelCard | None, commits: Mapping[str, str]
) -> ResolvedModel:
    wanted = pinned if is_commit(pinned) else commits.get(model_id, pinned)
    revision = hub_commit(model_id, wanted) or wanted
    config = hub_config(model_id, revision)
    fingerprint = f"{model_id}@{revision or 'main'}"
    return ResolvedModel(name=name, path=model_id, card=card, fingerprint=fingerprint, config=config, revision=revision)


def precision_for(keys: TargetKeys, model: ResolvedModel, hardware: Hardware) -> Precision:
    """The precision of a target's weights and KV cache on this hardware.

    Raises:
        ConfigError: the context is longer than the model's.
        PrecisionError: the hardware cannot run it, or the model has nothing to run in INT8.
    """
    require_computable(model.config, hardware)
    found = resolve_precision(
        keys.precision,
        hardware,
        native_quantization=model.native_quantization,
        native_kv_cache=published_kv_cache(model.config),
        kv_cache=keys.kv_cache_precision,
        context_tokens=max_model_len(model, keys.max_model_len),
        head_dim=widest_head(model.config),
    )
    if found.quantization == "int8":
        require_convertible(model.path, model.config, hardware)
    return found


def target_fields(keys: TargetKeys, model: ResolvedModel, hardware: Hardware, precision: Precision) -> dict[str, Any]:
    """Fields of an `EngineSpec` that any command fills alike.

    Raises:
        ConfigError: the context is longer than the model's, or vLLM has no such argument.
    """
    same = ("tensor_parallel_size", "enforce_eager", "kv_cache_gib", "gpu_memory_utilization")
    return {
        "model": model.path,
        "revision": model.revision,
        "precision": precision.name,  # nodes of another kind would each decide `auto` for themselves
        "kv_cache_precision": precision.kv_cache_name,
        "native_quantization": model.native_quantization,
        "max_model_len": max_model_len(model, keys.max_model_len),
        "extra": extra_arguments(keys, precision, model.config, on_gpu=hardware.platform == "cuda"),
        **{name: getattr(keys, name) for name in same},
    }
