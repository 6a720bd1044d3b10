"""Find this node's model files for an EngineSpec that was made on another machine."""

import dataclasses
import functools

from peagle.catalog.cards import load_catalog
from peagle.catalog.converted import log_to_stderr
from peagle.catalog.embedded import embedded_name, ensure_embedded
from peagle.catalog.fetched import ensure_fetched, is_in_object_store
from peagle.catalog.folders import peagle_home
from peagle.catalog.int8 import converted_spec
from peagle.catalog.shipped_heads import HEADS, complete_head, find_shipped_head
from peagle.catalog.targets import NO_COMMITS, is_hub_id, resolve_model
from peagle.engine.spec import EngineSpec
from peagle.errors import CatalogError
from peagle.private import user_path
from peagle.requests.prompts import Tokenizer
from peagle.requests.tokenizer import load_tokenizer


def local_spec(spec: EngineSpec) -> EngineSpec:
    """Return the spec with this node's model folders, after fetching and converting models if necessary."""
    spec = fetched_spec(spec)
    drafter = spec.drafter and dataclasses.replace(spec.drafter, model=local_drafter_path(spec.drafter.model))
    located = dataclasses.replace(spec, model=local_model_path(spec.model, spec.revision), drafter=drafter)
    return converted_spec(located)


def fetched_spec(spec: EngineSpec) -> EngineSpec:
    """Return the spec with local folders instead of `s3://` folders, after fetching them if necessary."""
    drafter = spec.drafter
    if drafter is not None and is_in_object_store(drafter.model):
        head = complete_head(ensure_fetched(drafter.model, drafter.revision, weights=True, announce=log_to_stderr))
        spec = dataclasses.replace(spec, drafter=dataclasses.replace(drafter, model=str(head), revision=None))
    if is_in_object_store(spec.model):
        folder = ensure_fetched(spec.model, spec.revision, weights=True, announce=log_to_stderr)
        spec = dataclasses.replace(spec, model=str(folder), revision=None)
    return spec


def local_drafter_path(name: str) -> str:
    """Return this node's folder of a drafter, or a hub id that vLLM downloads.

    The name may be a head's path on another machine, if the head is shipped or was also added to this node's catalog.
    """
    folder = user_path(name)
    if folder.exists():
        return str(folder.resolve())
    if folder.parent.name == HEADS and (shipped := find_shipped_head(folder.name)):
        return str(shipped)
    if folder.parent.name == HEADS and (peagle_home() / HEADS / folder.name).exists():
        return str((peagle_home() / HEADS / folder.name).resolve())
    card = load_catalog().find(name)
    if card is not None:
        is_packaged = card.source.kind == "package"
        return str(ensure_embedded(embedded_name(card.source.id))) if is_packaged else card.source.id
    if is_hub_id(name):
        return name
    raise CatalogError(
        f"{name} does not exist on this node", hint="put the files on shared storage, at the same path on every node"
    )


@functools.lru_cache(maxsize=4)
def local_model_path(model: str, revision: str | None = None, *, weights: bool = True) -> str:
    """Return this node's path of a model: a folder or a hub id.

    Args:
        weights: also fetch weights of an `s3://` folder.
    """
    if is_in_object_store(model):
        return str(ensure_fetched(model, revision, weights=weights, announce=log_to_stderr))
    return resolve_model(model, commits={model: revision} if revision else NO_COMMITS).path


@functools.lru_cache(maxsize=2)
def tokenizer_of(model: str | None, revision: str | None = None) -> Tokenizer:
    """Return the target's tokenizer, loaded once per process; a byte tokenizer for a fake engine without a model."""
    if model is None:
        from peagle.engine.fake import ByteTokenizer

        return ByteTokenizer()
    tokenizer: Tokenizer = load_tokenizer(local_model_path(model, revision, weights=False), revision)
    return tokenizer
