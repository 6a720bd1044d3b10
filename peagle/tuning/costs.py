"""What measuring takes: passes by arm, starts by engine, as learnt from those that were done. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One configuration that can be chosen.

    Attributes:
        engine: the engine that serves it, and others at other concurrencies.
        concurrency: requests in it at once.
        drafts: whether it speculates.
    """

    engine: str
    concurrency: int
    drafts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A pass of an arm."""

    arm: Arm
    repeat: int


class Costs:
    """Seconds of engine starts and passes. What was never done is taken to last as its like; at first, nothing."""

    def __init__(self) -> None:
        self._start_s: defaultdict[str, list[float]] = defaultdict(list)
        self._pass_s: defaultdict[Arm, list[float]] = defaultdict(list)

    def add(self, arm: Arm, *, start_s: float, pass_s: float) -> None:
        """A pass, and the start of the engine that ran it."""
        self._start_s[arm.engine].append(start_s)
        self._pass_s[arm].append(pass_s)

    def of(self, turns: Sequence[Turn], up: str | None) -> float:
        """Passes, and a start of each of their engines but the one that is up."""
        engines = {turn.arm.engine for turn in turns} - {up}
        return sum(map(self._start_of, engines)) + sum(self._pass_of(turn.arm) for turn in turns)

    def _start_of(self, engine: str) -> float:
        return _mean(self._start_s.get(engine, [])) or _mean(s for known in self._start_s.values() for s in known)

    def _pass_of(self, arm: Arm) -> float:
        """Its own, else those of the same concurrency, else all."""
        alike = (s for one, known in self._pass_s.items() if one.concurrency == arm.concurrency for s in known)
        every = (s for known in self._pass_s.values() for s in known)
        return _mean(self._pass_s.get(arm, [])) or _mean(alike) or _mean(every)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.mean(known) if known else 0.0
