"""The search over a made-up surface whose best configuration is known; engine time is counted, not spent."""

import itertools
from collections.abc import Callable, Mapping

import pytest

from peagle.tuning.halving import Arm, Score, Search, Turn

START_S, PASS_S = 60.0, 10.0
ENGINES = ("none", "k3", "k5", "k7")


class Surface:
    """Tokens/s by engine and concurrency, with noise that shrinks with passes; runs a search and notes what it did."""

    def __init__(
        self,
        speed: Callable[[str, int], float],
        *,
        budget_s: float = 1e9,
        noise: Mapping[Arm, float] | None = None,
        over: Callable[[Arm], float] = lambda arm: 0.0,
        broken: tuple[str, ...] = (),
        deadly: tuple[Arm, ...] = (),
    ) -> None:
        self.speed, self.noise, self.over, self.broken, self.deadly = speed, noise or {}, over, broken, deadly
        self.turns: list[Turn] = []
        self.starts: list[str] = []
        self.search = Search(arms(), score=self.score, budget_s=budget_s)

    def score(self, arm: Arm) -> Score | None:
        num = sum(turn.arm == arm for turn in self.turns)
        if not num:
            return None
        wrong = self.noise.get(arm, 0.0) / num**2
        return Score(value=self.speed(arm.engine, arm.concurrency) * (1 + wrong), excess=self.over(arm))

    def run(self, stop_after: int | None = None) -> Arm | None:
        search, up = self.search, None
        for _ in itertools.count() if stop_after is None else range(stop_after):
            if (turn := search.next(up)) is None:
                break
            if turn.arm.engine != up:
                up = turn.arm.engine
                search.spent_s += START_S
                self.starts.append(up)
                if up in self.broken:
                    search.fail(up, "out of memory")
                    up = None
                    continue
            search.spent_s += PASS_S
            if turn.arm in self.deadly:
                search.fail(turn.arm.engine, "it died")
                up = None
                continue
            self.turns.append(turn)
            search.add(turn, start_s=START_S, pass_s=PASS_S)
        return search.best()


def arm(engine: str, concurrency: int) -> Arm:
    return Arm(engine=engine, concurrency=concurrency, drafts=engine != "none")


def arms(engines: tuple[str, ...] = ENGINES) -> list[Arm]:
    return [arm(engine, concurrency) for engine in engines for concurrency in (1, 4, 16)]


def hill(engine: str, concurrency: int) -> float:
    """K=5 is the best at 4 requests at once, and no speculation at 16."""
    gain = {"none": 1.0, "k3": 1.3, "k5": 1.5, "k7": 1.1}[engine]
    return {1: 40 * gain, 4: 200 * gain, 16: 210 * (2 - gain)}[concurrency]


def test_it_finds_the_best_and_measures_it_most() -> None:
    surface = Surface(hill)
    assert surface.run() == arm("k5", 4)
    passes = {one: sum(turn.arm == one for turn in surface.turns) for one in arms()}
    assert passes[arm("k5", 4)] == max(passes.values()) > min(passes.values()) == 1
    assert len(surface.turns) < len(arms()) * max(passes.values()) / 2


def test_a_round_halves_the_arms_and_doubles_their_passes() -> None:
    surface = Surface(hill)
    surface.run()
    assert [len(arms) for arms in surface.search.rounds][:3] == [12, 6, 3]
    assert max(turn.repeat for turn in surface.turns) == 2 ** (len(surface.search.rounds) - 1) - 1


def test_one_engine_serves_all_its_concurrencies_and_the_one_at_the_turn_stays_up() -> None:
    surface = Surface(hill)
    surface.run()
    assert surface.starts[:4] == list(ENGINES)
    engines = [engine for engine, _ in itertools.groupby(turn.arm.engine for turn in surface.turns)]
    assert surface.starts == engines, "an engine is started only where another was up"
    second_round = {arm.engine for arm in surface.search.rounds[1]}
    if "k7" in second_round:
        assert surface.turns[12].arm.engine == "k7"


def test_luck_in_the_first_round_does_not_decide() -> None:
    lucky = Surface(hill, noise={arm("k3", 4): 0.3})  # 338 at first, against 300 of the best
    assert lucky.run(stop_after=12) == arm("k3", 4)
    assert Surface(hill, noise={arm("k3", 4): 0.3}).run() == arm("k5", 4)


@pytest.mark.parametrize("budget_s", [100.0, 300.0, 500.0, 700.0])
def test_the_budget_holds(budget_s: float) -> None:
    surface = Surface(hill, budget_s=budget_s)
    surface.run()
    # Only the very first engine may exceed it: before it nothing is known.
    assert surface.search.spent_s <= budget_s or len(surface.starts) == 1
    assert surface.turns


def test_what_the_budget_did_not_reach_is_still_pending() -> None:
    surface = Surface(hill, budget_s=200.0)
    assert surface.run() == arm("k3", 4), "the best of two engines"
    assert {turn.arm.engine for turn in surface.search.pending()} == {"k5", "k7"}
    assert surface.search.pending_s() == 2 * (START_S + 3 * PASS_S)


def test_a_round_that_the_budget_does_not_hold_in_full_takes_the_best_arms() -> None:
    whole = Surface(hill)
    whole.run()
    # Round 0 costs 360 s. 90 s more hold one engine and three passes, or less.
    surface = Surface(hill, budget_s=450.0)
    assert surface.run() == arm("k5", 4)
    assert 2 <= len(surface.search.rounds[1]) < len(whole.search.rounds[1])
    assert surface.search.rounds[1][0] == arm("k5", 4)


def test_a_killed_search_goes_on_as_if_it_had_not_been() -> None:
    whole = Surface(hill)
    whole.run()
    for after in range(0, len(whole.turns), 5):
        before = Surface(hill)
        before.run(stop_after=after)
        again = Surface(hill)
        again.turns = list(before.turns)
        rounds = before.search.rounds[1:]
        again.search = Search(arms(), score=again.score, budget_s=1e9, spent_s=before.search.spent_s, rounds=rounds)
        for turn in before.turns:
            again.search.add(turn, start_s=START_S, pass_s=PASS_S)
        again.run()
        assert again.search.best() == whole.search.best()
        assert set(again.turns) == set(whole.turns)
        assert len(again.turns) == len(whole.turns), "nothing was measured twice"


def test_more_budget_continues_where_the_smaller_one_ended() -> None:
    short = Surface(hill, budget_s=200.0)
    short.run()
    longer = Surface(hill)
    longer.turns = list(short.turns)
    longer.search = Search(arms(), score=longer.score, budget_s=1e9, spent_s=short.search.spent_s)
    for turn in short.turns:
        longer.search.add(turn, start_s=START_S, pass_s=PASS_S)
    assert longer.run() == arm("k5", 4)
    assert longer.starts[0] == "k5"


def resumed(before: Surface, budget_s: float) -> Surface:
    """The next command on what a search left: passes, rounds, what was cut of them, and time spent."""
    again = Surface(before.speed, noise=before.noise)
    again.turns = list(before.turns)
    rounds, cuts, spent_s = before.search.rounds[1:], before.search.cuts[1:], before.search.spent_s
    again.search = Search(arms(), score=again.score, budget_s=budget_s, spent_s=spent_s, rounds=rounds, cuts=cuts)
    for turn in before.turns:
        again.search.add(turn, start_s=START_S, pass_s=PASS_S)
    return again


@pytest.mark.parametrize(("budget_s", "number"), [(450.0, 1), (760.0, 2)])
def test_more_budget_takes_up_what_a_smaller_one_cut_of_a_round(budget_s: float, number: int) -> None:
    # k3 looks better than k5 at first, so that rounds which lack k5 go on with the wrong arms.
    noise = {arm("k3", 4): 0.3, arm("k3", 1): 0.2, arm("k7", 4): 0.2}
    short = Surface(hill, budget_s=budget_s, noise=noise)
    short.run()
    cut = short.search.cuts[number]
    assert cut
    assert not any(short.search.cuts[:number]), "it is the first round that is not whole"
    whole, longer = Surface(hill, noise=noise), resumed(short, 1e9)
    assert longer.run() == whole.run() == arm("k5", 4)
    assert set(whole.search.rounds[number]) == set(longer.search.rounds[number]) >= set(cut)
    assert len(set(longer.turns)) == len(longer.turns), "nothing was measured twice"
    assert set(short.turns) <= set(longer.turns)
    assert not any(longer.search.cuts)


def test_the_same_budget_takes_up_nothing_and_a_little_more_what_it_holds() -> None:
    short = Surface(hill, budget_s=450.0)
    short.run()
    num_arms, num_cut = len(short.search.rounds[1]), len(short.search.cuts[1])
    again = resumed(short, 450.0)
    again.run()
    assert again.turns == short.turns
    little = resumed(short, short.search.spent_s + START_S + PASS_S)
    little.run()
    assert (len(little.search.rounds[1]), len(little.search.cuts[1])) == (num_arms + 1, num_cut - 1)
    assert little.search.rounds[1][-1] == short.search.cuts[1][0], "the best of what was cut"


def test_an_arm_over_the_limit_loses_to_a_slower_one_within() -> None:
    surface = Surface(hill, over=lambda one: 0.1 if one.concurrency > 1 else 0.0)
    assert surface.run() == arm("k5", 1)


def test_the_nearest_to_the_limit_goes_on_when_all_are_over_it() -> None:
    surface = Surface(hill, over=lambda one: one.concurrency / 10)
    assert surface.run() is None
    assert {one.concurrency for one in surface.search.rounds[-1]} == {1}


def test_no_speculation_is_an_answer() -> None:
    surface = Surface(lambda engine, c: c * {"none": 50, "k3": 45, "k5": 40, "k7": 30}[engine])
    assert surface.run() == arm("none", 16)


def test_a_drafter_that_hardly_wins_loses_to_none_after_equal_measurements() -> None:
    surface = Surface(lambda engine, c: c * (50.5 if engine == "k3" else 50 if engine == "none" else 30))
    assert surface.run() == arm("none", 16)
    assert {arm("none", 16), arm("k3", 16)} <= set(surface.search.rounds[-1])


def test_no_speculation_that_is_far_behind_is_not_measured_again() -> None:
    surface = Surface(lambda engine, c: c * (20 if engine == "none" else 50))
    surface.run()
    assert len(surface.search.rounds) > 2
    assert all(one.drafts for arms in surface.search.rounds[2:] for one in arms)


def test_an_engine_that_does_not_start_is_left_out() -> None:
    surface = Surface(hill, broken=("k5",))
    assert surface.run() == arm("k3", 4)
    assert surface.search.failed == {"k5": "out of memory"}
    assert surface.starts.count("k5") == 1


def test_what_was_measured_before_an_engine_died_counts_and_is_measured_no_more() -> None:
    surface = Surface(hill, deadly=(arm("k5", 16),))
    assert surface.run() == arm("k5", 4)
    assert surface.starts.count("k5") == 1
    assert {turn for turn in surface.turns if turn.arm.engine == "k5"} == {
        Turn(arm=arm("k5", concurrency), repeat=0) for concurrency in (1, 4)
    }
    assert max(turn.repeat for turn in surface.turns) > 0, "the others go on"


def test_an_engine_that_died_takes_nothing_of_the_budget() -> None:
    # Round 0 costs 360 s, which leaves a start and a pass of k3, to compare with what k5 had.
    surface = Surface(hill, budget_s=435.0, deadly=(arm("k5", 16),))
    assert surface.run() == arm("k5", 4)
    assert surface.search.rounds[1][:2] == (arm("k5", 4), arm("k3", 4))


def test_what_was_measured_is_the_answer_when_every_engine_died_later() -> None:
    surface = Surface(hill, deadly=tuple(arm(engine, 16) for engine in ENGINES))
    assert surface.run() == arm("k5", 4)


def test_nothing_is_the_answer_when_every_engine_fails() -> None:
    surface = Surface(hill, broken=ENGINES)
    assert surface.run() is None


def test_one_configuration_is_not_compared_with_itself() -> None:
    surface = Surface(hill)
    surface.search = Search([arm("none", 4)], score=surface.score, budget_s=1e9)
    assert surface.run() == arm("none", 4)
    assert len(surface.turns) == 1
