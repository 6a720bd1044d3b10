"""Search with simulated speeds and a known best configuration."""

import itertools
from collections import Counter

import pytest

from peagle.tuning.search import FINAL_PASSES, Candidate, CandidatePass, Score, Search

START_S, PASS_S = 60.0, 10.0
ENGINES = ("none", "k3", "k5", "k7")


class SimulatedSearch:
    """A search with simulated tokens/s by engine and concurrency. More passes reduce the `noise`."""

    def __init__(self, speed, *, budget_s=1e9, noise=None, excess=lambda candidate: 0.0, broken=()):
        self.speed, self.noise, self.excess, self.broken = speed, noise or {}, excess, broken
        self.finished: list[CandidatePass] = []
        self.starts: list[str] = []
        self.search = Search(grid(), score=self.score, budget_s=budget_s)

    def score(self, candidate, num_passes):
        num_finished = sum(planned.candidate == candidate for planned in self.finished)
        if not num_finished:
            return None
        noise = self.noise.get(candidate, 0.0) / min(num_finished, num_passes or num_finished)
        return Score(
            value=self.speed(candidate.engine, candidate.concurrency) * (1 + noise), excess=self.excess(candidate)
        )

    def run(self):
        search, engine = self.search, None
        while (planned := search.next(engine)) is not None:
            if planned.candidate.engine != engine:
                engine = planned.candidate.engine
                search.spent_s += START_S
                self.starts.append(engine)
                if engine in self.broken:
                    search.fail(engine, "out of memory")
                    engine = None
                    continue
            search.spent_s += PASS_S
            self.finished.append(planned)
            search.add(planned, start_s=START_S, pass_s=PASS_S)
        return search.best()

    @property
    def passes(self):
        return Counter(planned.candidate for planned in self.finished)


def candidate(engine, concurrency):
    return Candidate(engine=engine, concurrency=concurrency, has_drafter=engine != "none")


def grid():
    return [candidate(engine, concurrency) for engine in ENGINES for concurrency in (1, 4, 16)]


def speed_of(engine, concurrency):
    """K=5 is best at concurrency 4, no speculation at 16."""
    gain = {"none": 1.0, "k3": 1.3, "k5": 1.5, "k7": 1.1}[engine]
    return {1: 40 * gain, 4: 200 * gain, 16: 210 * (2 - gain)}[concurrency]


def test_all_candidates_then_finalists_are_measured():
    simulated = SimulatedSearch(speed_of)
    assert simulated.run() == candidate("k5", 4)
    assert simulated.passes == {
        **dict.fromkeys(grid(), 1), candidate("k5", 4): FINAL_PASSES, candidate("k3", 4): FINAL_PASSES,
    }  # fmt: skip


def test_engine_is_started_once_for_all_concurrencies():
    simulated = SimulatedSearch(speed_of)
    simulated.run()
    assert simulated.starts[:4] == list(ENGINES)
    engines = [engine for engine, _ in itertools.groupby(planned.candidate.engine for planned in simulated.finished)]
    assert simulated.starts == engines


@pytest.mark.parametrize(("factor", "num_finalists"), [(1.25, 3), (0.9, 2)])
def test_candidate_without_a_drafter_is_a_finalist_if_nearly_as_fast(factor, num_finalists):
    simulated = SimulatedSearch(
        lambda engine, concurrency: (
            speed_of(engine, concurrency) * (factor if engine == "none" and concurrency == 4 else 1.0)
        )
    )
    simulated.run()
    assert sum(number == FINAL_PASSES for number in simulated.passes.values()) == num_finalists


def test_drafter_must_be_faster_by_two_percent():
    def equal_speed(engine, concurrency):
        return 300.0 if engine == "none" else 303.0 if engine == "k3" else 100.0

    best = SimulatedSearch(equal_speed).run()
    assert best is not None
    assert not best.has_drafter


@pytest.mark.parametrize("budget_s", [100.0, 300.0, 500.0, 700.0])
def test_search_ends_within_its_budget(budget_s):
    simulated = SimulatedSearch(speed_of, budget_s=budget_s)
    simulated.run()
    # Only the first engine may exceed the budget, because nothing has been measured yet.
    assert simulated.search.spent_s <= budget_s or len(simulated.starts) == 1
    assert simulated.finished


def test_candidates_within_limits_have_priority():
    limited = SimulatedSearch(speed_of, excess=lambda candidate: 0.1 if candidate.concurrency == 4 else 0.0)
    best = limited.run()
    assert best is not None
    assert best.concurrency != 4
    impossible = SimulatedSearch(speed_of, excess=lambda candidate: 0.1)
    assert impossible.run() is None
    assert impossible.search.ranked()
