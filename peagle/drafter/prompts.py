"""The shipped prompts of a training: code, and text of many kinds.

A source gives materials, each of which can be put as a request in several wordings. Nothing here knows models, tokens
or evaluation sets (see decontamination.py).
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
    """Something to ask about: a documented function, a passage of text, a table."""

    @property
    def module(self) -> str:
        """Where it was found."""

    @property
    def name(self) -> str:
        """Its name there."""

    @property
    def text(self) -> str:
        """The part that is searched for evaluation problems."""

    @property
    def num_wordings(self) -> int:
        """The number of requests about it."""

    def wording(self, seed: int, index: int) -> tuple[str, str]:
        """The category and text of one of the requests.

        Their order depends on the seed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompt:
    """One chat request and where it came from.

    Attributes:
        category: the kind of task: "code", "summary", ...
    """

    id: str
    prompt: str
    module: str
    name: str
    category: str


def is_shipped_source(source: str) -> bool:
    """Whether the prompts of a source are made here.

    `stdlib`, `package:NAME` of an installed package, `content` and `content:held-out` are.
    """
    return source in (STDLIB, CONTENT, HELD_OUT) or source.startswith(PACKAGE)


def source_materials(source: str) -> Sequence[Material]:
    """The materials of a shipped source.

    Raises:
        ConfigError: no such source, or no installed package of Python files.
    """
    if source in (CONTENT, HELD_OUT):
        return content_materials(held_out=source == HELD_OUT)
    if source == STDLIB:
        return folder_snippets(Path(sysconfig.get_paths()["stdlib"]))
    name = source.removeprefix(PACKAGE)
    spec = find_spec(name) if source.startswith(PACKAGE) and name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{source}: no such source of prompts",
            hint="stdlib, content, content:held-out, or package:NAME with the import name of an installed package",
        )
    return folder_snippets(Path(next(iter(spec.submodule_search_locations))))


def num_available(materials: Sequence[Material]) -> int:
    """The number of prompts: every material in every wording."""
    return sum(material.num_wordings for material in materials)


def generate_prompts(
    materials: Sequence[Material], *, source: str = STDLIB, seed: int = 0, limit: int | None = None
) -> Iterator[TrainingPrompt]:
    """Prompts in an order that depends on `seed` and the materials alone.

    Every material is asked about once before any is asked about again, each time in another wording, until
    `limit` prompts are out or all wordings of all materials are (which is where no limit ends).

    Raises:
        ConfigError: `limit` is more than there are wordings of materials.
    """
    available = num_available(materials)
    if limit is not None and limit > available:
        raise ConfigError(f"--limit {limit:,}: the source holds {available:,} prompts", hint="ask for fewer")
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
