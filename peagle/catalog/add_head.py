"""Add a drafter head to the user's catalog.

The head is checked and copied to `$PEAGLE_HOME/heads/NAME-METHOD-FINGERPRINT`, so that later changes of the original
folder have no effect. Previously added heads are kept. The card that `--drafter auto` reads is in
`$PEAGLE_HOME/models/NAME.yaml`.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from peagle.catalog.cards import HeadCard, ModelCard, Platform, SpeculationRow, load_catalog
from peagle.catalog.embedded import embedded_of_upstream
from peagle.catalog.fetched import is_stored
from peagle.catalog.folders import folder_fingerprint, peagle_home, read_config
from peagle.catalog.head_files import HeadFacts, check_fit, check_weights, read_head, read_shapes
from peagle.catalog.shipped_heads import HEADS
from peagle.catalog.targets import resolve_model
from peagle.errors import CatalogError, ConfigError, DrafterError
from peagle.files import write_atomic

_PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_UNMEASURED = "`peagle models add`; not measured"
_INHERITED = "not measured with this head; of the one before: "  # stored on cards
_UNKNOWN = "not confirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedHead:
    card: ModelCard
    path: Path
    facts: HeadFacts
    folder: Path
    replaced: str | None


def add_head(
    folder: Path,
    *,
    target: str | None = None,
    name: str | None = None,
    num_speculative_tokens: int | None = None,
    max_concurrency: int | None = None,
    announce: Callable[[str], None] = lambda message: None,
) -> AddedHead:
    """Add the head in `folder` to the user's catalog.

    Args:
        num_speculative_tokens: K; None uses the card's, the head's or the usual K.
        max_concurrency: draft up to this many concurrent requests; None uses the card's limit, if any.
    """
    config = read_config(folder, DrafterError)
    facts = read_head(config)
    matter = front_matter(folder)
    base = _find_base(folder, target or _stated_target(folder, config, matter), name, announce)
    check_fit(config, base.config)
    check_weights(read_shapes(folder), facts)
    card = base.card.model_copy(update={"name": _checked_name(name or base.card.name)})
    copy = peagle_home().resolve() / HEADS / f"{card.name}-{facts.method}-{folder_fingerprint(folder)[:8]}"
    former = card.heads.get(facts.method)
    words = _describe(folder, facts, matter)
    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ConfigError(f"K must be at least 1, got {num_speculative_tokens}")
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, got {max_concurrency}")
    head = HeadCard(kind="folder", id=str(copy), **words)
    rows = rows_with(card, facts, num_speculative_tokens, max_concurrency)
    values = {"heads": {**card.heads, facts.method: head}, "speculation": rows}
    card = ModelCard.model_validate(card.model_copy(update=values).model_dump())
    _copy(folder, copy)
    path = peagle_home() / "models" / f"{card.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(card.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    write_atomic(path, f"# Written by `peagle models add`.\n{text}".encode())
    return AddedHead(card=card, path=path, facts=facts, folder=copy, replaced=former.id if former else None)


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the YAML front matter of a model card, if any."""
    try:
        parts = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        values = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def rows_with(
    card: ModelCard, facts: HeadFacts, num_speculative_tokens: int | None, max_concurrency: int | None
) -> list[SpeculationRow]:
    """Return the card's rows with this head instead of the previous one.

    Measured concurrency limits are kept and, for a head of the same method, K too. A platform without rows gets a row
    for any concurrency.
    """
    rows: list[SpeculationRow] = []
    for platform in _PLATFORMS:
        before = [row for row in card.speculation if row.platform == platform]
        if max_concurrency is None and any(row.method != "none" for row in before):
            rows += [_inherited(row, facts, num_speculative_tokens) for row in before]
            continue
        k = num_speculative_tokens or facts.default_k
        row = {"platform": platform, "source": _UNMEASURED}
        drafting = row | {"max_concurrency": max_concurrency, "method": facts.method, "num_speculative_tokens": k}
        rows.append(SpeculationRow.model_validate(drafting))
        if max_concurrency is not None:
            rows.append(SpeculationRow.model_validate(row | {"method": "none", "num_speculative_tokens": 0}))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """A target's card, and its `config.json` or the equivalent facts from the card."""

    card: ModelCard
    config: Mapping[str, Any]


def _stated_target(folder: Path, config: Mapping[str, Any], matter: Mapping[str, Any]) -> str:
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    base_model = matter.get("base_model")
    stated = verifier.get("name_or_path") or (base_model[0] if isinstance(base_model, list) else base_model)
    if not stated:
        raise DrafterError(f"{folder} does not name its target model", hint="set --target")
    return str(stated)


def _find_base(folder: Path, target: str, name: str | None, announce: Callable[[str], None]) -> _Base:
    catalog = load_catalog()
    card = catalog.find(embedded_of_upstream(target) or target)
    if card is None:
        if is_stored(target):
            raise CatalogError(
                f"{folder} is for {target}, but cards require a local folder or a hub id as target",
                hint="copy the target to a local disk, or pass the head with --drafter in each command",
            )
        try:
            model = resolve_model(target, announce=announce)
        except CatalogError as error:
            hint = "set --target to a folder, a hub id or a catalog name on this machine"
            raise CatalogError(f"{folder} is for {target}: {error.message}", hint=hint) from error
        card = model.card or _new_card(model.path, model.config, name)
    taken = catalog.cards.get(name or card.name)
    if taken is not None and taken.source != card.source:
        raise CatalogError(f"the catalog already has another model named {taken.name}", hint="set another --name")
    facts = card.architecture
    config = {"hidden_size": facts.hidden_size, "num_hidden_layers": facts.num_layers, "vocab_size": facts.vocab_size}
    if None in config.values():
        config = dict(resolve_model(target, announce=announce).config)
    return _Base(card=card, config=config)


def _new_card(path: str, config: Mapping[str, Any], name: str | None) -> ModelCard:
    """Return a card with the facts from `config.json` of a target outside the catalog."""
    text = config.get("text_config") or config
    is_folder = Path(path).is_absolute()
    by = "`peagle models add`"
    card = {
        "name": _checked_name(name or re.sub(r"[^a-z0-9._-]+", "-", Path(path).name.lower()).strip("-.")),
        "title": Path(path).name,
        "summary": "Your own.",
        "source": {"kind": "folder" if is_folder else "huggingface", "id": path},
        "licence": {"name": _UNKNOWN, "source": by},
        "architecture": {
            "family": str(text.get("model_type", _UNKNOWN)),
            "hidden_size": text["hidden_size"],
            "num_layers": text["num_hidden_layers"],
            "vocab_size": text["vocab_size"],
            "num_parameters": None,
            "context_tokens": text.get("max_position_embeddings"),
            "source": f"config.json of {path}",
        },
        "precision": {"options": ["bf16"], "source": _UNMEASURED},
        "smallest_hardware": {"description": _UNKNOWN, "source": by},
    }
    return ModelCard.model_validate(card)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == "add":
        reason = "`peagle models add` is a command" if name == "add" else "use lower case, digits, '.', '_' and '-'"
        raise CatalogError(f"a model cannot be called {name!r}: {reason}", hint="set another --name")
    return name


def _describe(folder: Path, facts: HeadFacts, matter: Mapping[str, Any]) -> dict[str, Any]:
    layers = f"{facts.num_layers} layer{'s' if facts.num_layers > 1 else ''}"
    licence = matter.get("license")
    return {
        "licence": str(licence) if licence and licence != "unknown" else None,
        "note": f"{layers}, draft vocabulary {facts.draft_vocab_size:,}.",
        "source": f"`peagle models add`, {date.today().isoformat()}, from {folder.resolve()}",
    }


def _inherited(row: SpeculationRow, facts: HeadFacts, k: int | None) -> SpeculationRow:
    if row.method == "none":
        return row
    measured = row.num_speculative_tokens if row.method == facts.method else facts.default_k
    source = row.source if row.source == _UNMEASURED else _INHERITED + row.source.removeprefix(_INHERITED)
    return row.model_copy(update={"method": facts.method, "num_speculative_tokens": k or measured, "source": source})


def _copy(source: Path, folder: Path) -> None:
    if folder.exists():  # the same head was already added
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copyfile(file, staging / file.name)
        staging.chmod(0o755)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
