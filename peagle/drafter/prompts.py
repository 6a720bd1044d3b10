"""The shipped training prompts: code, and text of many kinds.

A source has materials, and each material has several wordings of a request.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from peagle.drafter.code_prompts import folder_snippets
from peagle.drafter.content_prompts import content_materials
from peagle.errors import ConfigError

STDLIB = "stdlib"
PACKAGE = "package:"
CONTENT = "content"
HELD_OUT = "content:held-out"


class Material(Protocol):
    """The subject of a prompt: a documented function, a passage of text, a table."""

    @property
    def module(self) -> str:
        """The module or package that contains it."""

    @property
    def name(self) -> str:
        """Its name in that module."""

    @property
    def text(self) -> str:
        """The text to compare with evaluation sets."""

    @property
    def num_wordings(self) -> int:
        """The number of different requests."""

    def wording(self, seed: int, index: int) -> tuple[str, str]:
        """Return the category and text of a request. The seed determines their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompt:
    """A chat request and its origin.

    Attributes:
        category: the kind of task: "code", "summary", ...
    """

    id: str
    prompt: str
    module: str
    name: str
    category: str


def is_shipped_source(source: str) -> bool:
    return source in (STDLIB, CONTENT, HELD_OUT) or source.startswith(PACKAGE)


def source_materials(source: str) -> Sequence[Material]:
    if source in (CONTENT, HELD_OUT):
        return content_materials(held_out=source == HELD_OUT)
    if source == STDLIB:
        return folder_snippets(Path(sysconfig.get_paths()["stdlib"]))
    name = source.removeprefix(PACKAGE)
    spec = find_spec(name) if source.startswith(PACKAGE) and name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{source}: unknown source of prompts",
            hint="use stdlib, content, content:held-out, or package:NAME with the import name of an installed package",
        )
    return folder_snippets(Path(next(iter(spec.submodule_search_locations))))


def num_available(materials: Sequence[Material]) -> int:
    return sum(material.num_wordings for material in materials)


def generate_prompts(
    materials: Sequence[Material], *, source: str = STDLIB, seed: int = 0, limit: int | None = None
) -> Iterator[TrainingPrompt]:
    """Yield up to `limit` prompts, in an order that depends only on `seed` and the materials.

    Every material occurs once before one occurs again in another wording.
    """
    available = num_available(materials)
    if limit is not None and limit > available:
        raise ConfigError(f"--limit {limit:,}: the source has only {available:,} prompts", hint="decrease --limit")
    left = available if limit is None else limit
    for round_index in range(max((material.num_wordings for material in materials), default=0)):
        order = [index for index, material in enumerate(materials) if round_index < material.num_wordings]
        random.Random(f"{seed}/{round_index}").shuffle(order)
        for index in order[:left]:
            yield _prompt(materials[index], source.removeprefix(PACKAGE), seed, round_index)
        left -= min(left, len(order))


def _prompt(material: Material, origin: str, seed: int, round_index: int) -> TrainingPrompt:
    category, text = material.wording(seed, round_index)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return TrainingPrompt(
        id=f"{origin.replace(':', '-')}-{digest}",
        prompt=text,
        module=material.module,
        name=material.name,
        category=category,
    )
