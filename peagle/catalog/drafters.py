"""Resolve the drafter of a model and check that it fits.

"auto" is the recommendation on the model's card for the concurrency and platform, possibly no drafter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.catalog.cards import HeadCard, ModelCard, Platform, load_catalog
from peagle.catalog.fetched import fetch, find_stored, is_in_object_store
from peagle.catalog.folders import folder_fingerprint, peagle_home, read_config
from peagle.catalog.head_files import check_fit
from peagle.catalog.shipped_heads import HEADS, HEADS_FOLDER, complete_head
from peagle.catalog.targets import NO_COMMITS, ResolvedModel, hub_commit, hub_config, is_hub_id
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec
from peagle.errors import DrafterError
from peagle.private import user_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDrafter:
    """A resolved drafter.

    Attributes:
        note: the reason for the choice, shown to the user.
        fingerprint: fingerprint of the head; None without a drafter.
    """

    spec: DrafterSpec | None
    name: str | None
    note: str
    fingerprint: str | None


def resolve_drafter(
    name: str,
    model: ResolvedModel,
    concurrency: int,
    *,
    num_speculative_tokens: int | None = None,
    platform: Platform | None = None,
    commits: Mapping[str, str] = NO_COMMITS,
) -> ResolvedDrafter:
    """Resolve a drafter's name: none, auto, a method, or any name that `find_head` accepts."""
    if name == "none":
        return _no_drafter("no drafter requested")
    if name == "auto":
        return _recommended_drafter(model, concurrency, num_speculative_tokens, platform, commits)
    best = model.card.speculation_for(concurrency, platform) if model.card else None
    k_by_method = {str(best.method): best.num_speculative_tokens} if best else {}
    method = name if name in DRAFT_METHODS else name.lower().replace("-", "")  # accepts "P-EAGLE", too
    is_method = name in DRAFT_METHODS or (method in DRAFT_METHODS and not user_path(name).exists())
    path = _card_head_path(model, method) if is_method else find_head(name, model)
    return _drafter_with_head(model, path, num_speculative_tokens, k_by_method, commits, platform, note="as requested")


def find_head(name: str, model: ResolvedModel | None = None) -> str:
    """Return the folder or hub id of a head, from any name that reports use for it.

    Existing paths, `s3://` folders and unknown names are returned unchanged. The card of `model` is searched
    first, then the other cards, then the heads in `$PEAGLE_HOME`.
    """
    if is_in_object_store(name) or user_path(name).exists():
        return name
    if (head := find_on_cards(name, model)) is not None:
        return head[1]
    folder = peagle_home() / HEADS / name
    return str(folder) if Path(name).name == name and folder.is_dir() else name


def find_on_cards(name: str, model: ResolvedModel | None = None) -> tuple[str, str] | None:
    """Return a catalog head's method, and its folder or hub id; None if no card has this name."""
    cards = [model.card] if model is not None and model.card else []
    for card in (*cards, *load_catalog()):
        for method, head in card.heads.items():
            if head.id and name in (head.id, Path(head.id).name):
                return method, _folder_or_hub_id(head)
            if head.long_context_id and name in (head.long_context_id, Path(head.long_context_id).name):
                return method, head.long_context_id
    return None


def _recommended_drafter(
    model: ResolvedModel, concurrency: int, k: int | None, platform: Platform | None, commits: Mapping[str, str]
) -> ResolvedDrafter:
    if model.card is None:
        return _no_drafter(f"{model.name} is not in the catalog; set --drafter to use a drafter")
    best = model.card.speculation_for(concurrency, platform)
    if best is None:
        situation = f"{concurrency} concurrent requests" + (f" on {platform}" if platform else "")
        return _no_drafter(f"no measurements for {situation}; set --drafter to try a drafter")
    if best.method == "none":
        return _no_drafter(f"with {concurrency} concurrent requests a drafter costs more than it saves ({best.source})")
    path = _folder_or_hub_id(model.card.heads[best.method])
    if not is_hub_id(path) and not Path(path).is_dir():
        return _no_drafter(f"the {best.method} head of {model.name} is missing from this installation")
    note = f"recommended for {concurrency} concurrent requests ({best.source})"
    k_by_method = {str(best.method): best.num_speculative_tokens}
    return _drafter_with_head(model, path, k, k_by_method, commits, platform, note=note)


def _drafter_with_head(
    model: ResolvedModel,
    path: str,
    k: int | None,
    k_by_method: Mapping[str, int],
    commits: Mapping[str, str],
    platform: Platform | None,
    *,
    note: str,
) -> ResolvedDrafter:
    located = _locate_head(path, commits)
    head = check_fit(located.config, model.config)
    if k is None:
        k = k_by_method.get(head.method) or head.default_k
    if head.max_k is not None and k > head.max_k:
        raise DrafterError(
            f"K={k} exceeds the {head.max_k} tokens that {located.name} drafts in one block",
            hint=f"use --num-speculative-tokens {head.max_k} or less",
        )
    if head.mixes_attention and head.max_k is not None and platform == "cpu":
        raise DrafterError(
            f"{located.name} mixes sliding and full attention, which vLLM supports in a {head.method} head only on GPUs"
        )
    path_or_id = located.model if located.folder is None else str(complete_head(located.folder))
    head_cards = model.card.heads.values() if model.card else ()
    head_card = next((c for c in head_cards if path in (_folder_or_hub_id(c), c.long_context_id)), None)
    trained_k = head_card.max_speculative_tokens if head_card else None
    if trained_k is not None and k > trained_k and head.method != "eagle3":
        note += f"; K={k} exceeds the {trained_k} that the head was trained for: later tokens are often rejected"
    return ResolvedDrafter(
        spec=DrafterSpec(method=head.method, model=path_or_id, num_speculative_tokens=k, revision=located.revision),
        name=located.name,
        note=note,
        fingerprint=located.fingerprint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocatedHead:
    """A head in a local folder, in an object store or on the hub; `model` is its path or hub id."""

    model: str
    name: str
    config: Mapping[str, Any]
    fingerprint: str
    folder: Path | None = None
    revision: str | None = None


def _locate_head(path: str, commits: Mapping[str, str]) -> _LocatedHead:
    if is_in_object_store(path):
        stored = find_stored(path)
        config = read_config(fetch(stored), DrafterError)
        return _LocatedHead(
            model=str(stored.path),
            name=stored.path.name,
            config=config,
            fingerprint=stored.fingerprint(),
            revision=stored.revision,
        )
    folder = user_path(path)
    if folder.exists():
        config, folder = read_config(folder, DrafterError), folder.resolve()
        fingerprint = folder_fingerprint(folder)
        return _LocatedHead(model=str(folder), name=folder.name, config=config, fingerprint=fingerprint, folder=folder)
    if not is_hub_id(path):
        raise DrafterError(
            f"no such drafter: {path}",
            hint=f"use auto, none, {', '.join(DRAFT_METHODS)}, a head that `peagle models` lists, a local folder, "
            "s3://BUCKET/FOLDER or a hub id ORG/NAME",
        )
    revision = hub_commit(path, commits.get(path)) or commits.get(path)
    fingerprint = f"{path}@{revision or 'main'}"
    return _LocatedHead(
        model=path, name=path, config=hub_config(path, revision), fingerprint=fingerprint, revision=revision
    )


def _card_head_path(model: ResolvedModel, method: str) -> str:
    head_card = _heads_by_method(model.card).get(method) if model.card else None
    if head_card is None or not head_card.published:
        reason = f": {head_card.note}" if head_card else ""
        heads = {card.name: _heads_by_method(card).get(method) for card in load_catalog()}
        models = [name for name, head in heads.items() if head and head.published]
        raise DrafterError(
            f"the catalog has no {method} head for {model.name}{reason}",
            hint=f"the catalog has {method} heads for {', '.join(models)}; for other models, set --drafter to the"
            " folder or hub id of a head, or to none",
        )
    return _folder_or_hub_id(head_card)


def _heads_by_method(card: ModelCard) -> dict[str, HeadCard]:
    return {str(method): head for method, head in card.heads.items()}


def _folder_or_hub_id(card: HeadCard) -> str:
    return str(HEADS_FOLDER / str(card.id)) if card.kind == "shipped" else str(card.id)


def _no_drafter(note: str) -> ResolvedDrafter:
    return ResolvedDrafter(spec=None, name=None, note=note, fingerprint=None)
