"""The schedule of kills, a function of the seed."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["engine", "actor", "node", "driver"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_AFTER_UNITS = (0, 1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill.

    Attributes:
        kind: engine: the engine's own process (vLLM's EngineCore); actor: its Ray actor; node: a raylet
            with all its workers; driver: `peagle generate`.
        after_units: units committed since the previous kill; 0 also hits engines that still start.
        wait_s: delay after that.
        pick: which of the candidates, from 0 to 1.
    """

    kind: Kind
    after_units: int
    wait_s: float
    pick: float

    def choose(self, candidates: list[int]) -> int:
        return sorted(candidates)[int(self.pick * len(candidates))]


def schedule(seed: int, run: int, *, num_kills: int, max_wait_s: float) -> list[Kill]:
    """Return the kills of a run: all kinds about equally often, in random order at random moments."""
    rng = random.Random(f"{seed}:{run}")
    kinds: list[Kind] = []
    while len(kinds) < num_kills:
        kinds += rng.sample(KINDS, len(KINDS))
    return [
        Kill(
            kind=kind,
            after_units=rng.choice(_AFTER_UNITS),
            wait_s=round(rng.uniform(0.0, max_wait_s), 2),
            pick=rng.random(),
        )
        for kind in kinds[:num_kills]
    ]
