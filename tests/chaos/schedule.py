"""The schedule of kills, which depends only on the seed."""

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
        kind: what is killed: the engine's core process (vLLM's EngineCore), its Ray actor, a node (a raylet with its
            workers), or the driver (`peagle generate`).
        after_units: number of units that are committed between the previous kill and this one; with 0, engines may
            still be starting.
        wait_s: delay after these units.
        pick: the position of the victim among the sorted candidates, from 0 to 1.
    """

    kind: Kind
    after_units: int
    wait_s: float
    pick: float

    def choose(self, candidates: list[int]) -> int:
        return sorted(candidates)[int(self.pick * len(candidates))]


def schedule(seed: int, run: int, *, num_kills: int, max_wait_s: float) -> list[Kill]:
    """Return the kills of a run: all kinds equally often, in random order, at random times."""
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
