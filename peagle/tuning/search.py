"""The order of measurements in a tuning run: a grid within a time budget, then the finalists again.

Every configuration is measured in one pass. The two best, and the best of the other kind (with or without a drafter)
if it is close, are then measured again, so that luck in one pass does not decide. One engine serves several
concurrencies, so all passes of the running engine come first. A pass or engine that is expected to exceed the
budget is not started. The search depends only on the finished passes, so nothing else is stored.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from peagle.tuning.config import TuneConfig

MIN_GAIN = 0.02  # a drafter must be faster by this fraction, because it is one more component that can fail
FINAL_PASSES = 3
P95 = "p95"  # key in summaries
_CLOSE = 0.8  # fraction of the best value that makes a candidate of the other kind a finalist


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration that can be chosen: an engine (the name of its setup) and a concurrency."""

    engine: str
    concurrency: int
    has_drafter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePass:
    """One pass of a candidate. Passes are numbered by `repeat`."""

    candidate: Candidate
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a candidate. `excess` is the largest relative excess over a limit; 0 within all limits."""

    value: float
    excess: float = 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, the best first: within the limits by value, then the others by excess."""
        return (True, self.excess) if self.excess > 0 else (False, -self.value)


class Durations:
    """Seconds of engine starts and passes. Unknown ones are estimated from similar ones; 0 if there are none."""

    def __init__(self) -> None:
        self._start_s: defaultdict[str, list[float]] = defaultdict(list)
        self._pass_s: defaultdict[Candidate, list[float]] = defaultdict(list)

    def add(self, candidate: Candidate, *, start_s: float, pass_s: float) -> None:
        self._start_s[candidate.engine].append(start_s)
        self._pass_s[candidate].append(pass_s)

    def total_s(self, passes: Sequence[CandidatePass], running: str | None) -> float:
        """Return the seconds of these passes and of starting their engines, except the `running` engine."""
        engines = {planned.candidate.engine for planned in passes} - {running}
        mean_start_s = _mean(chain.from_iterable(self._start_s.values()))
        starts_s = sum(_mean(self._start_s.get(engine, [])) or mean_start_s for engine in engines)
        return starts_s + sum(self._expected_pass_s(planned.candidate) for planned in passes)

    def _expected_pass_s(self, candidate: Candidate) -> float:
        """Return the mean time of the candidate's passes, else of passes at its concurrency, else of all passes."""
        same_concurrency = [s for other, s in self._pass_s.items() if other.concurrency == candidate.concurrency]
        mean_s = _mean(self._pass_s.get(candidate, [])) or _mean(chain.from_iterable(same_concurrency))
        return mean_s or _mean(chain.from_iterable(self._pass_s.values()))


class Search:
    """Decides what to measure next, and returns the best candidate.

    Args:
        candidates: in the order in which their engines are to be started.
        score: returns a candidate's score from its first `num_passes` passes (None: from all), or None without passes.

    Attributes:
        spent_s: engine time; updated by the caller.
        failed: for each engine that failed to start or crashed, the reason. The engine's finished passes still count.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        score: Callable[[Candidate, int | None], Score | None],
        budget_s: float,
        spent_s: float = 0.0,
    ) -> None:
        self.candidates = tuple(candidates)
        self.spent_s = spent_s
        self.failed: dict[str, str] = {}
        self._score, self._budget_s = score, budget_s
        self._durations = Durations()
        self._num_passes: dict[Candidate, int] = {}

    def add(self, planned: CandidatePass, *, start_s: float, pass_s: float) -> None:
        self._num_passes[planned.candidate] = self._num_passes.get(planned.candidate, 0) + 1
        self._durations.add(planned.candidate, start_s=start_s, pass_s=pass_s)

    def fail(self, engine: str, reason: str) -> None:
        self.failed[engine] = reason

    def next(self, running: str | None = None) -> CandidatePass | None:
        """Return the next pass, or None if everything is measured or the budget is too small."""
        pending = self.pending()
        for planned in pending:
            if planned.candidate.engine == running and self._fits([planned], running):
                return planned
        for engine in dict.fromkeys(
            planned.candidate.engine for planned in pending if planned.candidate.engine != running
        ):
            passes = [planned for planned in pending if planned.candidate.engine == engine]
            if self._fits(passes, running):
                return passes[0]
        return None

    def pending(self) -> list[CandidatePass]:
        """Return the passes that are still to be run: first those of the grid, then those of the finalists."""
        return self._missing(self.candidates, 1) or self._missing(self._finalists(), FINAL_PASSES)

    def pending_s(self, running: str | None = None) -> float:
        return self._durations.total_s(self.pending(), running)

    def ranked(self, candidates: Iterable[Candidate] | None = None, num_passes: int | None = None) -> list[Candidate]:
        chosen = self.candidates if candidates is None else candidates
        scores = {}
        for candidate in chosen:
            if (score := self._score(candidate, num_passes)) is not None:
                scores[candidate] = score
        return sorted(scores, key=lambda candidate: scores[candidate].rank)

    def best(self) -> Candidate | None:
        """Return the best candidate within the limits, if any. Finalists come before candidates measured once.

        A drafter is only the best if it is faster than no speculation by at least `MIN_GAIN`.
        """
        ranked = [*self.ranked(self._finalists()), *self.ranked()]
        within_limits = [candidate for candidate in ranked if self._is_within(candidate)]
        if not within_limits:
            return None
        best = within_limits[0]
        no_drafter = next((candidate for candidate in within_limits if not candidate.has_drafter), None)
        if best.has_drafter and no_drafter is not None and self._value(best) < (1 + MIN_GAIN) * self._value(no_drafter):
            return no_drafter
        return best

    def _finalists(self) -> list[Candidate]:
        """Return the candidates to measure again. Only first passes count, so that the finalists do not change."""
        ranked = self.ranked(num_passes=1)
        finalists = ranked[:2]
        other_kind = [candidate for candidate in ranked if candidate.has_drafter != ranked[0].has_drafter]
        if other_kind and self._is_within(other_kind[0], 1) and self._is_within(ranked[0], 1):
            is_close = self._value(other_kind[0], 1) >= _CLOSE * self._value(ranked[0], 1)
            finalists += [other_kind[0]] if is_close and other_kind[0] not in finalists else []
        return finalists if len(finalists) > 1 else []

    def _missing(self, candidates: Iterable[Candidate], num_passes: int) -> list[CandidatePass]:
        return [
            CandidatePass(candidate=candidate, repeat=repeat)
            for candidate in candidates
            if candidate.engine not in self.failed
            for repeat in range(self._num_passes.get(candidate, 0), num_passes)
        ]

    def _fits(self, passes: Sequence[CandidatePass], running: str | None) -> bool:
        return (
            self.spent_s < self._budget_s and self.spent_s + self._durations.total_s(passes, running) <= self._budget_s
        )

    def _value(self, candidate: Candidate, num_passes: int | None = None) -> float:
        score = self._score(candidate, num_passes)
        assert score is not None, "a ranked candidate was measured"
        return score.value

    def _is_within(self, candidate: Candidate, num_passes: int | None = None) -> bool:
        score = self._score(candidate, num_passes)
        return score is not None and score.excess <= 0


def score(summary: Mapping[str, Any], config: TuneConfig) -> Score:
    """Return the score of a candidate. A limit without measured times counts as exceeded by 100 %."""
    value = summary["output_tokens_per_s"]
    if config.objective == "tokens-per-dollar":
        value = summary["tokens_per_usd"]
        assert value is not None, "make_plan() requires a price for this objective"
    return Score(value=value, excess=max(0.0, *excesses(summary, config).values(), 0.0))


def excesses(summary: Mapping[str, Any], config: TuneConfig) -> dict[str, float]:
    """Return the relative excess over each limit: negative within the limit; empty if there are no limits."""
    limits = {"tpot_s": config.max_tpot_ms, "ttft_s": config.max_ttft_ms}
    return {
        name: (summary[name][P95] * 1000 / limit_ms - 1 if summary[name] else 1.0)
        for name, limit_ms in limits.items()
        if limit_ms is not None
    }


def _mean(values: Iterable[float]) -> float:
    seconds = list(values)
    return statistics.mean(seconds) if seconds else 0.0
