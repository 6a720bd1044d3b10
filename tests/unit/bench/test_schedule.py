from itertools import groupby

from peagle.bench.progress import time_left_s
from peagle.bench.schedule import all_passes, visits

from .conftest import record, setup

A, B, C = setup("none"), setup("eagle3"), setup("peagle")


def shown(repeats: int, rounds: int) -> list[tuple[str, list[tuple[int, int]]]]:
    planned = visits(all_passes([A, B, C], [1, 4], repeats, rounds))
    return [(visit.setup.method, [(p.repeat, p.concurrency) for p in visit.passes]) for visit in planned]


def test_a_round_turns_the_order_round_and_the_engine_at_the_turn_stays_up() -> None:
    assert shown(repeats=2, rounds=2) == [
        ("none", [(0, 1), (0, 4)]),
        ("eagle3", [(0, 1), (0, 4)]),
        ("peagle", [(0, 1), (0, 4), (1, 1), (1, 4)]),
        ("eagle3", [(1, 1), (1, 4)]),
        ("none", [(1, 1), (1, 4)]),
    ]


def test_repeats_are_shared_out_among_fewer_rounds() -> None:
    assert shown(repeats=3, rounds=2)[0] == ("none", [(0, 1), (0, 4), (2, 1), (2, 4)])
    assert shown(repeats=3, rounds=1) == [
        (m, [(r, c) for r in range(3) for c in (1, 4)]) for m in ("none", "eagle3", "peagle")
    ]


def test_there_are_no_more_rounds_than_repeats() -> None:
    assert shown(repeats=1, rounds=5) == shown(repeats=1, rounds=1)


def test_every_pass_is_there_once_and_a_steady_drift_weighs_on_all_alike() -> None:
    passes = all_passes([A, B, C], [1], repeats=2, rounds=2)
    assert len(set(passes)) == len(passes) == 6
    places = sorted((p.setup.method, i) for i, p in enumerate(passes))
    sums = {method: sum(i for _, i in group) for method, group in groupby(places, key=lambda place: place[0])}
    assert len(set(sums.values())) == 1


def test_what_is_done_is_left_out_and_saves_its_engine() -> None:
    passes = all_passes([A, B, C], [1, 4], repeats=2, rounds=2)
    left = [p for p in passes if not (p.setup == B and p.repeat == 0) and (p.setup, p.repeat) != (C, 1)]
    assert [visit.setup.method for visit in visits(left)] == ["none", "peagle", "eagle3", "none"]


def test_time_left_counts_starts_and_takes_passes_of_the_same_concurrency() -> None:
    left = all_passes([A, B], [1, 4], repeats=1, rounds=1)
    done = [record(concurrency=1, wall_s=10.0), record(concurrency=1, wall_s=12.0), record(concurrency=4, wall_s=4.0)]
    assert time_left_s(done, left, is_up=False) == 2 * 20 + 2 * (11 + 4)
    assert time_left_s(done, left, is_up=True) == 20 + 2 * (11 + 4)
    assert time_left_s(done[:2], left, is_up=False) == 2 * 20 + 4 * 11  # concurrency 4 is not known yet
    assert time_left_s([], left, is_up=False) is None
    assert time_left_s(done, [], is_up=True) == 0
