"""Add a drafter head to the user's catalog.

The head is checked and copied to `$PEAGLE_HOME/heads/NAME-METHOD-FINGERPRINT`; previously added heads are kept. The
card that `--drafter auto` reads is in `$PEAGLE_HOME/models/NAME.yaml`.
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
from peagle.catalog.fetched import is_in_object_store
from peagle.catalog.folders import folder_fingerprint, peagle_home, read_config
from peagle.catalog.head_files import HeadFacts, check_fit, check_weights, read_head, read_shapes
from peagle.catalog.shipped_heads import HEADS
from peagle.catalog.targets import resolve_model
from peagle.errors import CatalogError, ConfigError, DrafterError
from peagle.files import write_atomic

_UNMEASURED = "`peagle models add`; not measured"
_INHERITED = "not measured with this head; source for the previous head: "  # prefix of a row's source on a card
_UNKNOWN = "not confirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedHead:
    """The card with the added head. `replaced` is the id of the head that it replaces, if any."""

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
        num_speculative_tokens: K; None keeps the card's K for this method, or else uses the head's default.
        max_concurrency: use a drafter for up to this many concurrent requests; None keeps the card's limit, if any.
    """
    config = read_config(folder, DrafterError)
    facts = read_head(config)
    front_matter = _read_front_matter(folder)
    if target is None:
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        base_model = front_matter.get("base_model")
        target = verifier.get("name_or_path") or (base_model[0] if isinstance(base_model, list) else base_model)
        if not target:
            raise DrafterError(f"{folder} does not name its target model", hint="set --model")
    card, target_config = _find_target(folder, str(target), name, announce)
    check_fit(config, target_config)
    check_weights(read_shapes(folder), facts)
    card = card.model_copy(update={"name": _checked_name(name or card.name)})
    head_folder = peagle_home().resolve() / HEADS / f"{card.name}-{facts.method}-{folder_fingerprint(folder)[:8]}"
    previous_head = card.heads.get(facts.method)
    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ConfigError(f"K must be at least 1, got {num_speculative_tokens}")
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, got {max_concurrency}")
    licence = front_matter.get("license")
    layers = f"{facts.num_layers} layer{'s' if facts.num_layers > 1 else ''}"
    head = HeadCard(
        kind="folder",
        id=str(head_folder),
        licence=str(licence) if licence and licence != "unknown" else None,
        note=f"{layers}, draft vocabulary {facts.draft_vocab_size:,}.",
        source=f"`peagle models add`, {date.today().isoformat()}, from {folder.resolve()}",
    )
    rows = _speculation_rows(card, facts, num_speculative_tokens, max_concurrency)
    values = {"heads": {**card.heads, facts.method: head}, "speculation": rows}
    card = ModelCard.model_validate(card.model_copy(update=values).model_dump())
    _copy_head(folder, head_folder)
    path = peagle_home() / "models" / f"{card.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    card_yaml = yaml.safe_dump(card.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    write_atomic(path, f"# Written by `peagle models add`.\n{card_yaml}".encode())
    return AddedHead(
        card=card, path=path, facts=facts, folder=head_folder, replaced=previous_head.id if previous_head else None
    )


def _read_front_matter(folder: Path) -> dict[str, Any]:
    """Return the YAML front matter of a model card, if any."""
    try:
        parts = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        values = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _speculation_rows(
    card: ModelCard, facts: HeadFacts, num_speculative_tokens: int | None, max_concurrency: int | None
) -> list[SpeculationRow]:
    """Return the card's rows with this head instead of the previous one.

    Without `max_concurrency`, previous limits of concurrency are kept and, for a head of the same method, K too. A
    platform without rows gets a row for any concurrency.
    """
    rows: list[SpeculationRow] = []
    platforms: tuple[Platform, ...] = ("cpu", "cuda")
    for platform in platforms:
        previous_rows = [row for row in card.speculation if row.platform == platform]
        if max_concurrency is None and any(row.method != "none" for row in previous_rows):
            for row in previous_rows:
                if row.method == "none":
                    rows.append(row)
                    continue
                k = row.num_speculative_tokens if row.method == facts.method else facts.default_k
                source = row.source if row.source == _UNMEASURED else _INHERITED + row.source.removeprefix(_INHERITED)
                changes = {"num_speculative_tokens": num_speculative_tokens or k, "source": source}
                rows.append(row.model_copy(update=changes | {"method": facts.method}))
            continue
        rows.append(
            SpeculationRow(
                platform=platform,
                max_concurrency=max_concurrency,
                method=facts.method,
                num_speculative_tokens=num_speculative_tokens or facts.default_k,
                source=_UNMEASURED,
            )
        )
        if max_concurrency is not None:
            rows.append(SpeculationRow(platform=platform, method="none", num_speculative_tokens=0, source=_UNMEASURED))
    return rows


def _find_target(
    folder: Path, target: str, name: str | None, announce: Callable[[str], None]
) -> tuple[ModelCard, Mapping[str, Any]]:
    """Return a target's card, and its `config.json` or the same sizes from the card."""
    catalog = load_catalog()
    card = catalog.find(embedded_of_upstream(target) or target)
    if card is None:
        if is_in_object_store(target):
            raise CatalogError(
                f"{folder} is for {target}, but cards require a local folder or a hub id as target",
                hint="copy the target to a local disk, or pass the head with --drafter in each command",
            )
        try:
            model = resolve_model(target, announce=announce)
        except CatalogError as error:
            hint = "set --model to a folder, a hub id or a catalog name on this machine"
            raise CatalogError(f"{folder} is for {target}: {error.message}", hint=hint) from error
        card = model.card or _new_card(model.path, model.config, name)
    existing_card = catalog.cards.get(name or card.name)
    if existing_card is not None and existing_card.source != card.source:
        raise CatalogError(
            f"the catalog already has another model named {existing_card.name}", hint="set another --name"
        )
    sizes = card.architecture
    config = {"hidden_size": sizes.hidden_size, "num_hidden_layers": sizes.num_layers, "vocab_size": sizes.vocab_size}
    if None in config.values():
        config = dict(resolve_model(target, announce=announce).config)
    return card, config


def _new_card(path: str, config: Mapping[str, Any], name: str | None) -> ModelCard:
    """Return a card with the facts from `config.json` of a target outside the catalog."""
    text_config = config.get("text_config") or config
    is_folder = Path(path).is_absolute()
    source = "`peagle models add`"
    card = {
        "name": _checked_name(name or re.sub(r"[^a-z0-9._-]+", "-", Path(path).name.lower()).strip("-.")),
        "title": Path(path).name,
        "summary": "Your own.",
        "source": {"kind": "folder" if is_folder else "huggingface", "id": path},
        "licence": {"name": _UNKNOWN, "source": source},
        "architecture": {
            "family": str(text_config.get("model_type", _UNKNOWN)),
            "hidden_size": text_config["hidden_size"],
            "num_layers": text_config["num_hidden_layers"],
            "vocab_size": text_config["vocab_size"],
            "num_parameters": None,
            "context_tokens": text_config.get("max_position_embeddings"),
            "source": f"config.json of {path}",
        },
        "precision": {"options": ["bf16"], "source": _UNMEASURED},
        "smallest_hardware": {"description": _UNKNOWN, "source": source},
    }
    return ModelCard.model_validate(card)


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or name == "add":
        reason = "`peagle models add` is a command" if name == "add" else "use a-z, 0-9, '.', '_' and '-'"
        raise CatalogError(f"a model cannot be called {name!r}: {reason}", hint="set another --name")
    return name


def _copy_head(source: Path, destination: Path) -> None:
    if destination.exists():  # the same head was already added
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copyfile(file, staging / file.name)
        staging.chmod(0o755)
        staging.rename(destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
