"""Resolve a model's name: catalog name, folder, `s3://` folder or hub id.

Only `config.json` is downloaded from the hub; vLLM downloads the weights.
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
from peagle.catalog.fetched import ensure_fetched, fetch, find_stored, is_in_object_store
from peagle.catalog.folders import folder_fingerprint, read_config
from peagle.catalog.int8 import require_convertible
from peagle.engine.checkpoint import checkpoint_kv_cache_dtype, checkpoint_quant_method, require_supported
from peagle.engine.keys import TargetOptions, extra_arguments, widest_head_dim
from peagle.engine.precision import Precision, resolve_precision
from peagle.errors import CatalogError, ConfigError
from peagle.hardware import Hardware
from peagle.private import user_path


def hub_config(model_id: str, revision: str | None = None) -> dict[str, Any]:
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
                hint="accept its licence on the hub and set HF_TOKEN",
            ) from error
        except HfHubHTTPError as error:
            raise CatalogError(
                f"huggingface.co has no model {model_id}, or it is private: {error.response.status_code}",
                hint="check the id; a private model requires HF_TOKEN",
            ) from error
        except LocalEntryNotFoundError as error:
            raise _unreachable(model_id) from error
    return dict(json.loads(Path(path).read_text()))


def hub_commit(model_id: str, revision: str | None = None) -> str | None:
    """Return the commit of a hub id's revision (default: the main branch); None if unknown.

    The hub has priority over the cache. `config.json` is requested by the branch's name, so that the cache can resolve
    the branch later without a network.
    """
    if is_commit(revision):
        return revision
    path = _config_path(model_id, revision, cache_only=False) if _is_reachable() else None
    commit = (path or _config_path(model_id, revision, cache_only=True) or Path()).parent.name
    return commit if is_commit(commit) else None


def is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def _config_path(model_id: str, revision: str | None, *, cache_only: bool) -> Path | None:
    """Return the path of `config.json` in the cache, SNAPSHOTS/COMMIT/config.json; None if it is not available."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_id, "config.json", revision=revision, local_files_only=cache_only))
    except OSError:  # also the client's own errors; `hub_config` reports them
        return None


def _is_reachable() -> bool:
    """Return whether the hub is reachable; True behind a proxy, because only the hub's client can use the proxy.

    Without a network, the client itself would try for half a minute.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def _unreachable(model_id: str) -> CatalogError:
    return CatalogError(
        f"{model_id} is not in the local Hugging Face cache and huggingface.co is not reachable",
        hint="check the network, use a local folder, or use the embedded model: --model smollm2-135m",
    )


NO_COMMITS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A target that an engine can load.

    Attributes:
        path: a local folder, a hub id that vLLM downloads, or an `s3://` folder that each node fetches (`fetched.py`).
        revision: the revision to load. For a hub id, the commit of the card's revision or of the main branch; if the
            commit is unknown, the card's revision, or None (the latest). For an `s3://` folder, the listing's hash.
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
        """The id on the hub, or None if the model is a user's folder on disk or in an object store."""
        if self.card is not None and self.card.source.kind == "package":
            return EMBEDDED_TARGETS[embedded_name(self.card.source.id)].upstream_id
        return self.path if is_hub_id(self.path) else None

    @property
    def vocab_size(self) -> int | None:
        size: int | None = (self.config.get("text_config") or self.config).get("vocab_size")
        return size

    @property
    def native_quantization(self) -> str | None:
        return checkpoint_quant_method(self.config) or (self.card.precision.native_quantization if self.card else None)


def resolve_model(
    name: str, *, commits: Mapping[str, str] = NO_COMMITS, announce: Callable[[str], None] = lambda message: None
) -> ResolvedModel:
    """Resolve a model's name. A target inside a package is converted on first use (half a minute).

    Args:
        name: an `s3://` folder, or else a catalog name, local folder or hub id, tried in this order.
        commits: pinned commits by hub id, which override the current branches.
    """
    if is_in_object_store(name):
        stored = find_stored(name)
        return ResolvedModel(
            name=stored.path.name,
            path=str(stored.path),
            card=None,
            config=_checked_config(fetch(stored), str(stored.path)),
            fingerprint=stored.fingerprint(),
            revision=stored.revision,
            weights_bytes=stored.weights_bytes,
        )
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
    """Return the model's context: the maximum number of prompt and output tokens of a request."""
    tokens = (model.config.get("text_config") or model.config).get("max_position_embeddings")
    if not isinstance(tokens, int):
        raise ConfigError(f"{model.name}: config.json has no max_position_embeddings", hint="set max_model_len")
    return tokens


def max_model_len(model: ResolvedModel, requested: int | None) -> int:
    limit = context_tokens(model)
    if requested is not None and requested > limit:
        raise ConfigError(f"max_model_len is {requested}, but the context of {model.name} has {limit} tokens")
    return requested or limit


def name_of(model: str) -> str:
    """Return a model's display name; for a path, the folder's name.

    >>> name_of("smollm2-135m"), name_of("org/model"), name_of("/srv/models/mine/"), name_of("./mine")
    ('smollm2-135m', 'org/model', 'mine', 'mine')
    """
    return model if is_hub_id(model) else Path(model).name or model


def is_hub_id(name: str) -> bool:
    owner, _, rest = name.partition("/")
    return bool(owner and rest) and "/" not in rest and not name.startswith((".", "~"))


def fetched_model(model: ResolvedModel, announce: Callable[[str], None]) -> ResolvedModel:
    """Return the model. If it is in an object store, fetch it first, and replace its path with the local folder."""
    if not is_in_object_store(model.path):
        return model
    folder = ensure_fetched(model.path, model.revision, weights=True, announce=announce)
    return replace(model, path=str(folder), revision=None)


def _local_model(name: str, folder: Path, card: ModelCard | None) -> ResolvedModel:
    fingerprint, config = folder_fingerprint(folder), _checked_config(folder, str(folder))
    return ResolvedModel(name=name, path=str(folder), card=card, fingerprint=fingerprint, config=config)


def _checked_config(folder: Path, where: str) -> dict[str, Any]:
    config = read_config(folder, CatalogError)
    text_config = config.get("text_config") or config
    if missing := [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key not in text_config]:
        raise CatalogError(f"{where}/config.json has no {', '.join(missing)}: is it a language model?")
    return config


def _hub_model(
    name: str, model_id: str, card_revision: str | None, card: ModelCard | None, commits: Mapping[str, str]
) -> ResolvedModel:
    requested = card_revision if is_commit(card_revision) else commits.get(model_id, card_revision)
    revision = hub_commit(model_id, requested) or requested
    config = hub_config(model_id, revision)
    fingerprint = f"{model_id}@{revision or 'main'}"
    return ResolvedModel(name=name, path=model_id, card=card, fingerprint=fingerprint, config=config, revision=revision)


def precision_for(options: TargetOptions, model: ResolvedModel, hardware: Hardware) -> Precision:
    """Return the precision of a target's weights and KV cache on this hardware."""
    require_supported(model.config, hardware)
    precision = resolve_precision(
        options.precision,
        hardware,
        native_quantization=model.native_quantization,
        native_kv_cache=checkpoint_kv_cache_dtype(model.config),
        kv_cache=options.kv_cache_precision,
        context_tokens=max_model_len(model, options.max_model_len),
        head_dim=widest_head_dim(model.config),
    )
    if precision.quantization == "int8":
        require_convertible(model.path, model.config, hardware)
    return precision


def target_fields(
    options: TargetOptions, model: ResolvedModel, hardware: Hardware, precision: Precision
) -> dict[str, Any]:
    """Return the fields of an `EngineSpec` that all commands share."""
    option_names = ("tensor_parallel_size", "enforce_eager", "kv_cache_gib", "gpu_memory_utilization")
    return {
        "model": model.path,
        "revision": model.revision,
        "precision": precision.name,  # resolved once, since `auto` depends on the node
        "kv_cache_precision": precision.kv_cache_name,
        "native_quantization": model.native_quantization,
        "max_model_len": max_model_len(model, options.max_model_len),
        "extra": extra_arguments(options, precision, model.config, on_gpu=hardware.platform == "cuda"),
        **{name: getattr(options, name) for name in option_names},
    }
