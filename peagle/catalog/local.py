"""This node's files of models: the folders of a spec, and a target's tokenizer.

A driver on another machine has named them; `targets.py` and `drafters.py` did that.
"""

import dataclasses
import functools

from peagle.catalog.cards import load_catalog
from peagle.catalog.converted import tell
from peagle.catalog.embedded import embedded_name, ensure_embedded
from peagle.catalog.fetched import ensure_fetched, is_stored
from peagle.catalog.folders import peagle_home
from peagle.catalog.int8 import converted_spec
from peagle.catalog.shipped_heads import HEADS, find_shipped_head, whole_head
from peagle.catalog.targets import NO_COMMITS, is_hub_id, resolve_model
from peagle.engine.spec import EngineSpec
from peagle.errors import CatalogError
from peagle.private import user_path
from peagle.requests.prompts import Tokenizer
from peagle.requests.tokenizer import load_tokenizer


def local_spec(spec: EngineSpec) -> EngineSpec:
    """The spec with the folders that this node has for its models.

    What lies in a store is fetched, and a target in INT8 converted, where this node has not done it yet.

    Raises:
        CatalogError: a model is not to be had here.
        StorageError, CapacityError: it cannot be fetched.
    """
    spec = fetched_spec(spec)
    drafter = spec.drafter and dataclasses.replace(spec.drafter, model=local_path(spec.drafter.model))
    here = dataclasses.replace(spec, model=localize(spec.model, spec.revision), drafter=drafter)
    return converted_spec(here)


def fetched_spec(spec: EngineSpec) -> EngineSpec:
    """The spec with this node's folders of models that lie in a store.

    Standard error is told what is fetched.

    Raises:
        CatalogError, StorageError, CapacityError: as `ensure_fetched`.
    """
    drafter = spec.drafter
    if drafter is not None and is_stored(drafter.model):
        head = whole_head(ensure_fetched(drafter.model, drafter.revision, weights=True, announce=tell))
        spec = dataclasses.replace(spec, drafter=dataclasses.replace(drafter, model=str(head), revision=None))
    if is_stored(spec.model):
        folder = ensure_fetched(spec.model, spec.revision, weights=True, announce=tell)
        spec = dataclasses.replace(spec, model=str(folder), revision=None)
    return spec


def local_path(name: str) -> str:
    """This node's path of a model or a drafter.

    A folder, or a hub id that vLLM downloads here.

    A driver on another machine may have named a head by the path of its own installation or home; one that ships
    or that was added here too is found.

    Raises:
        CatalogError: nothing by that name on this node.
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
        f"{name} does not exist on this node", hint="put it on storage that every node sees, at the same path"
    )


@functools.lru_cache(maxsize=4)
def localize(model: str, revision: str | None = None, *, weights: bool = True) -> str:
    """This node's path of a model: a folder, or a hub id in vLLM's own cache.

    Args:
        revision: as its spec pins it; with it the node need not ask where the main branch of a hub id is.
        weights: whether those of an `s3://` folder are needed, or only what lies beside them.
    """
    if is_stored(model):
        return str(ensure_fetched(model, revision, weights=weights, announce=tell))
    return resolve_model(model, commits={model: revision} if revision else NO_COMMITS).path


@functools.lru_cache(maxsize=2)
def tokenizer_of(model: str | None, revision: str | None = None) -> Tokenizer:
    """The target's tokenizer, loaded once a process.

    Bytes where the fake engine has no model.
    """
    if model is None:
        from peagle.engine.fake import ByteTokenizer

        return ByteTokenizer()
    tokenizer: Tokenizer = load_tokenizer(localize(model, revision, weights=False), revision)
    return tokenizer
