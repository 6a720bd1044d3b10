from collections import Counter

from tests.chaos.schedule import KINDS, Kill, schedule


def test_a_seed_and_a_run_decide_all_and_every_kind_has_its_share():
    plan = schedule(7, 3, num_kills=10, max_wait_s=5.0)
    assert plan == schedule(7, 3, num_kills=10, max_wait_s=5.0)
    assert plan != schedule(8, 3, num_kills=10, max_wait_s=5.0)
    assert plan != schedule(7, 4, num_kills=10, max_wait_s=5.0)
    counts = Counter(kill.kind for kill in plan)
    assert set(counts) == set(KINDS)
    assert set(counts.values()) <= {2, 3}
    assert all(0 <= kill.wait_s <= 5 for kill in plan)
    assert {kill.kind for kill in schedule(7, 3, num_kills=4, max_wait_s=5.0)} == set(KINDS)


def test_a_victim_is_chosen_by_its_place_whatever_the_order():
    kills = [Kill(kind="actor", after_units=0, wait_s=1, pick=pick) for pick in (0.0, 0.5, 0.99)]
    assert [kill.choose([30, 10, 20]) for kill in kills] == [10, 20, 30]
    assert [kill.choose([10]) for kill in kills] == [10, 10, 10]
