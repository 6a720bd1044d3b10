"""The next configuration to measure: successive halving within a time budget.

With the costs of measuring, and scores by the objective. Pure.

In round 0 every configuration (an arm) is measured in one pass. Then the better half goes on, and has twice as many
passes by the end of each round as by that of the one before. An arm names the engine that can serve it, and one engine
serves several: what is still to be measured on the engine that is up comes first, and starting another is part of
its price. Neither a pass nor an engine is begun that is known to end beyond the budget. What only the budget keeps out
of a round is remembered: a later command with a larger budget takes up the first round that lacks something it can now
hold, and decides the rounds after it anew, with every pass that was measured.

The best arm that drafts and the best that does not stay together as long as they are close, so that a drafter that
does not pay is found out by equal measurements.

It knows scores and seconds; it knows nothing of engines, prompts or files.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.tuning.config import TuneConfig


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
    """Seconds of engine starts and passes.

    What was never done is taken to last as its like; at first, nothing.
    """

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


WORTH = 0.02
"""A drafter has to win by this share over none: it is one more part that can fail."""
_CLOSE = 0.2  # beyond this share behind, the better of the other kind is not measured again


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good an arm is.

    Attributes:
        value: of the objective; more is better.
        excess: the share by which it is over a limit; 0 within all of them.
    """

    value: float
    excess: float = 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort the best first.

        Within the limits by value; those beyond after them, by how far.
        """
        return (True, self.excess) if self.excess > 0 else (False, -self.value)


class Search:
    """The rounds of one tuning.

    Args:
        arms: in the order in which their engines are to be started.
        score: of an arm by what was measured of it so far; None before its first pass.
        budget_s: engine time, starting included.
        spent_s: of it, by earlier commands.
        rounds: decided by earlier commands, after round 0.
        cuts: what only the budget kept out of them; nothing where that is not known.

    Attributes:
        rounds: the arms of every round so far.
        cuts: of every round the arms that only the budget kept out, the best first.
        spent_s: engine time so far.
        failed: engines that did not start or died, and why; what was measured on them before still counts.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        score: Callable[[Arm], Score | None],
        budget_s: float,
        spent_s: float = 0.0,
        rounds: Iterable[Sequence[Arm]] = (),
        cuts: Iterable[Sequence[Arm]] = (),
    ) -> None:
        self.rounds: list[tuple[Arm, ...]] = [tuple(arms), *map(tuple, rounds)]
        self.cuts: list[tuple[Arm, ...]] = [(), *map(tuple, cuts)]
        self.cuts += [()] * (len(self.rounds) - len(self.cuts))
        self._has_begun = False
        self.spent_s = spent_s
        self.failed: dict[str, str] = {}
        self._score, self._budget_s = score, budget_s
        self._costs = Costs()
        self._num_passes: dict[Arm, int] = {}

    def add(self, turn: Turn, *, start_s: float, pass_s: float) -> None:
        """A pass is done; `spent_s` is counted by whoever runs it."""
        self._num_passes[turn.arm] = self._num_passes.get(turn.arm, 0) + 1
        self._costs.add(turn.arm, start_s=start_s, pass_s=pass_s)

    def fail(self, engine: str, reason: str) -> None:
        """An engine is measured no more; its arms keep the passes that they have."""
        self.failed[engine] = reason

    def next(self, up: str | None = None) -> Turn | None:
        """The next measurement.

        None when the best is found, or the budget does not hold more.

        Args:
            up: the engine that is up.
        """
        if not self._has_begun:  # only between commands does the budget grow
            self._readmit(up)
            self._has_begun = True
        while True:
            if pending := self.pending():
                return self._affordable(pending, up)
            following, cut = self._following(up)
            if self._is_settled(following):
                return None
            self.rounds.append(following)
            self.cuts.append(cut)

    def pending(self) -> list[Turn]:
        """Passes of the present round that are still to be run."""
        return self._missing(self.rounds[-1], len(self.rounds) - 1)

    def pending_s(self, up: str | None = None) -> float:
        """Seconds of the rest of the present round, as far as is known."""
        return self._costs.of(self.pending(), up)

    def ranked(self, arms: Iterable[Arm]) -> list[Arm]:
        """Those that were measured, the best first."""
        scores = [(arm, self._score(arm)) for arm in arms]
        return [arm for arm, score in sorted(_known(scores), key=lambda one: one[1].rank)]

    def best(self) -> Arm | None:
        """The answer so far; None where no arm is within the limits.

        It is the best of the last round with anything within them. A drafter that does not win by `WORTH` over no
        speculation loses.
        """
        for arms in reversed(self.rounds):
            for arm in self.ranked(arms):
                if self._within(arm):
                    return self._without_if_as_good(arm)
        return None

    # --- rounds

    def _following(self, up: str | None) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
        """The better half that the budget holds, and the part it does not hold.

        An empty half is no round.
        """
        ranked = self.ranked(self.rounds[-1])
        num_wanted = math.ceil(len(ranked) / 2)
        wanted = ranked[: num_wanted if len(self.rounds) > 1 else max(2, num_wanted)]
        wanted += [arm for arm in self._best_of_other_kind(ranked) if arm not in wanted]
        return self._held((), sorted(wanted, key=ranked.index), len(self.rounds), up)

    def _readmit(self, up: str | None) -> None:
        """Go back to the first round of which the budget now holds more than it did."""
        for number, (arms, cut) in enumerate(zip(self.rounds, self.cuts, strict=True)):
            held, still_cut = self._held(arms, cut, number, up)
            if len(held) > len(arms):
                self.rounds[number:] = [held]
                self.cuts[number:] = [still_cut]
                return

    def _held(
        self, arms: Sequence[Arm], more: Sequence[Arm], number: int, up: str | None
    ) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
        """Arms of a round that the budget holds, the first ones first; and the rest."""
        held, cut = list(arms), list[Arm]()
        for arm in more:
            fits = self._fits(self._costs.of(self._missing([*held, arm], number), up))
            (held if fits else cut).append(arm)
        return tuple(held), tuple(cut)

    def _missing(self, arms: Iterable[Arm], number: int) -> list[Turn]:
        """Passes that these arms still need by the end of a round."""
        return [
            Turn(arm=arm, repeat=repeat)
            for arm in arms
            if arm.engine not in self.failed
            for repeat in range(self._num_passes.get(arm, 0), 2**number)
        ]

    def _best_of_other_kind(self, ranked: Sequence[Arm]) -> list[Arm]:
        others = [arm for arm in ranked if arm.drafts != ranked[0].drafts] if ranked else []
        if not others or not self._within(others[0]) or not self._within(ranked[0]):
            return []
        is_close = self._value(others[0]) >= (1 - _CLOSE) * self._value(ranked[0])
        return others[:1] if is_close else []

    def _is_settled(self, following: Sequence[Arm]) -> bool:
        """Whether another round would decide nothing.

        Or the rest of the budget does not pay for a comparison.
        """
        return len(following) < 2 or (len(self.rounds) > 1 and set(following) == set(self.rounds[-1]))

    # --- budget

    def _affordable(self, pending: Sequence[Turn], up: str | None) -> Turn | None:
        """A pass on the running engine, else the first of an affordable engine.

        The budget must hold that engine's whole round.
        """
        for turn in pending:
            if turn.arm.engine == up and self._fits(self._costs.of([turn], up)):
                return turn
        for engine in dict.fromkeys(turn.arm.engine for turn in pending if turn.arm.engine != up):
            turns = [turn for turn in pending if turn.arm.engine == engine]
            if self._fits(self._costs.of(turns, up)):
                return turns[0]
        return None

    def _fits(self, seconds: float) -> bool:
        return self.spent_s < self._budget_s and self.spent_s + seconds <= self._budget_s

    # --- scores

    def _value(self, arm: Arm) -> float:
        score = self._score(arm)
        assert score is not None, "a ranked arm was measured"
        return score.value

    def _within(self, arm: Arm) -> bool:
        score = self._score(arm)
        return score is not None and score.excess <= 0

    def _without_if_as_good(self, arm: Arm) -> Arm:
        plain = [one for one in self.ranked(self.rounds[0]) if not one.drafts and self._within(one)]
        if arm.drafts and plain and self._value(arm) < (1 + WORTH) * self._value(plain[0]):
            return plain[0]
        return arm


def _known(scores: Iterable[tuple[Arm, Score | None]]) -> list[tuple[Arm, Score]]:
    return [(arm, score) for arm, score in scores if score is not None]


P95 = "p95"


def score(summary: Mapping[str, Any], config: TuneConfig) -> Score:
    """The score of one summary (`peagle.bench.record.summarise`).

    A limit that cannot be checked, since the engine states no times, counts as exceeded by all of it.
    """
    value = summary["output_tokens_per_s"]
    if config.objective == "tokens-per-dollar":
        value = summary["tokens_per_usd"]
        assert value is not None, "make_space() wants a price for this objective"
    return Score(value=value, excess=max(0.0, *excesses(summary, config).values(), 0.0))


def excesses(summary: Mapping[str, Any], config: TuneConfig) -> dict[str, float]:
    """By limit, the share by which it is exceeded; negative within.

    Empty where no limit was set.
    """
    limits = {"tpot_s": config.max_tpot_ms, "ttft_s": config.max_ttft_ms}
    return {
        name: (summary[name][P95] * 1000 / limit_ms - 1 if summary[name] else 1.0)
        for name, limit_ms in limits.items()
        if limit_ms is not None
    }
