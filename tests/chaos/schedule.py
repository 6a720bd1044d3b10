"""What is killed when. Pure: a seed in, a schedule out; it knows no process."""

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
        kind: engine: the engine's own process (vLLM's EngineCore); actor: the process that holds it; node: a raylet
            with all its workers; driver: `peagle generate`.
        after_units: units that have to be committed since the kill before; 0 also hits engines that still start.
        wait_s: from then on.
        pick: which of those that there are, from 0 to 1.
    """

    kind: Kind
    after_units: int
    wait_s: float
    pick: float

    def choose(self, candidates: list[int]) -> int:
        """The candidate at this kill's place; there must be one."""
        return sorted(candidates)[int(self.pick * len(candidates))]


def schedule(seed: int, run: int, *, num_kills: int, max_wait_s: float) -> list[Kill]:
    """The kills of one run: every kind as often as another, give or take one, in a random order at random moments."""
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
