"""In which order engines are up, and which passes each runs while it is. Pure.

A repeat of a cell should come long after the one before it, with other methods in between, so that a machine that
drifts drifts under all of them; but each start of an engine costs a minute or more. So the repeats are shared out
among rounds. In every round each engine is up once; the order is turned round from one round to the next (A B C, C B
A), so that a steady drift weighs on all alike, and the engine at the turn stays up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from peagle.bench.setups import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """All prompts once through one engine at one concurrency."""

    setup: Setup
    concurrency: int
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """An engine that is up once, and the passes that it runs."""

    setup: Setup
    passes: tuple[Pass, ...]


def all_passes(setups: Sequence[Setup], concurrencies: Sequence[int], repeats: int, rounds: int) -> list[Pass]:
    """Every pass in its order; within an engine, the concurrencies of a repeat before the next repeat."""
    num_rounds = min(rounds, repeats)
    ordered = []
    for round_index in range(num_rounds):
        share = [repeat for repeat in range(repeats) if repeat % num_rounds == round_index]
        for setup in setups if round_index % 2 == 0 else reversed(setups):
            ordered += [Pass(setup=setup, concurrency=c, repeat=r) for r in share for c in concurrencies]
    return ordered


def visits(passes: Sequence[Pass]) -> list[Visit]:
    """One engine start for each stretch of passes of the same engine."""
    return [Visit(setup=setup, passes=tuple(stretch)) for setup, stretch in groupby(passes, key=lambda one: one.setup)]
