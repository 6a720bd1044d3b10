"""Reads the catalog: the cards that ship with peagle and the user's own in `$PEAGLE_HOME/models`.

A user's card of the same name replaces the shipped one. It knows YAML and the cards' schema, and nothing of
weights.
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from peagle.catalog.cards import ModelCard
from peagle.catalog.home import peagle_home
from peagle.errors import CatalogError, did_you_mean
from peagle.private import user_path

_SHIPPED = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Catalog:
    """Model cards by name."""

    cards: Mapping[str, ModelCard]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.cards)

    def get(self, name: str) -> ModelCard:
        """The card of a model, by its catalog name or its hub id.

        Raises:
            CatalogError: no such model; names the nearest.
        """
        card = self.find(name)
        if card is None:
            raise self.unknown(name)
        return card

    def unknown(self, name: str) -> CatalogError:
        """The error for a name that is not here, with the nearest."""
        return CatalogError(
            f"no model {name!r} in the catalog",
            hint=f"{did_you_mean(name, self.cards)} (a local folder or a hub id ORG/NAME also work)",
        )

    def find(self, name: str) -> ModelCard | None:
        """As `get`, but None where there is none."""
        by_id = {card.source.id.lower(): card for card in self.cards.values()}
        return self.cards.get(name) or by_id.get(name.lower())

    def __iter__(self) -> Iterator[ModelCard]:
        return (self.cards[name] for name in self.names())


def load_catalog() -> Catalog:
    """Shipped cards, then the user's.

    Raises:
        CatalogError: a card does not parse; says which file and which key.
    """
    paths = sorted(_SHIPPED.glob("*.yaml")) + sorted((peagle_home() / "models").glob("*.yaml"))
    return Catalog({card.name: card for card in map(load_card, paths)})


def load_card(path: Path) -> ModelCard:
    """One card. Its name must be the file's.

    Raises:
        CatalogError: not YAML, or not a valid card; says which key, and the nearest valid one.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CatalogError(f"{path}: cannot be read as YAML: {error}") from error
    try:
        card = ModelCard.model_validate(values)
    except ValidationError as error:
        raise CatalogError(f"{path}: {describe_error(error)}", hint=nearest_key(error, ModelCard)) from error
    if card.name != path.stem:
        raise CatalogError(f"{path}: says name: {card.name}", hint=f"rename the file to {card.name}.yaml")
    return card


def describe_error(error: ValidationError) -> str:
    """The first fault of a validation, by key, and how many others there are."""
    faults = error.errors()
    first = faults[0]
    key = ".".join(map(str, first["loc"])) or "the whole file"
    reason = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{key}: {reason}{more}"


def nearest_key(error: ValidationError, model: type[BaseModel]) -> str:
    """A hint with the valid keys nearest to the first unknown one; nothing when no key is unknown."""
    for fault in error.errors():
        if fault["type"] == "extra_forbidden":
            *parents, key = fault["loc"]
            return did_you_mean(str(key), _valid_keys(model, parents))
    return ""


def _valid_keys(model: Any, parents: list[Any]) -> list[str]:
    """Field names of the model that stands at `parents`, through lists and mappings."""
    kind: Any = model
    for parent in parents:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(parent)].annotation if parent in kind.model_fields else None
        elif get_origin(kind) in (list, dict):
            kind = get_args(kind)[-1]
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def lasting_name(name: str) -> str:
    """The same model by a name that holds wherever a command runs: of a folder its whole path."""
    folder = user_path(name)
    return str(folder.resolve()) if load_catalog().find(name) is None and folder.exists() else name
