"""The simulated fleet: every second accounted, every unit committed, faults cost what they must, the same by seed."""

from dataclasses import replace

import pytest

from peagle.planning.simulation import Fleet, simulate

QUIET = Fleet(num_machines=2, engines_per_machine=2, num_units=40, unit_s=60.0, start_s=100.0, unit_spread=0.0)


def test_without_faults_it_is_provisioning_starting_and_working() -> None:
    found = simulate(replace(QUIET, provision_s=180), 0)
    assert found.wall_s == pytest.approx(180 + 100 + 10 * 60)
    assert found.machine_s == pytest.approx(2 * 700)
    assert (found.engine_s.load, found.engine_s.busy, found.engine_s.lost) == (400, 2400, 0)
    assert found.useful_share == pytest.approx(2400 / 2800)


def test_a_seed_is_one_run_and_another_is_another() -> None:
    stormy = replace(QUIET, failures_per_h=3.0, num_units=200, unit_spread=0.3, replace_s=60)
    assert simulate(stormy, 1) == simulate(stormy, 1)
    assert simulate(stormy, 1) != simulate(stormy, 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", [{"failures_per_h": 4.0}, {"interruptions_per_h": 4.0, "notice_s": 30.0}])
def test_all_units_are_committed_and_every_engine_second_belongs_to_a_share(fault: dict[str, float], seed: int) -> None:
    found = simulate(replace(QUIET, num_units=200, replace_s=60, **fault), seed)
    assert found.engine_s.busy == pytest.approx(200 * 60), "each unit once, however often it was lost"
    assert found.num_gone > 0
    assert found.engine_s.lost > 0
    assert found.engine_s.total == pytest.approx(2 * found.machine_s)


def test_a_long_notice_loses_nothing() -> None:
    found = simulate(replace(QUIET, num_units=200, interruptions_per_h=4.0, notice_s=120.0, replace_s=60), 0)
    assert found.num_gone > 0
    assert found.engine_s.lost == 0


def test_a_run_that_is_to_end_counts_what_was_done_until_then() -> None:
    found = simulate(QUIET, 0, until_s=100 + 3.5 * 60)
    assert (found.wall_s, found.engine_s.load, found.engine_s.busy) == (310, 400, 4 * 210)


def test_machines_that_come_late_work_less() -> None:
    at_once, late = simulate(QUIET, 0), simulate(replace(QUIET, machines_per_min=0.2), 0)
    assert late.wall_s > at_once.wall_s
    assert late.machine_s < 2 * late.wall_s


def test_a_slow_driver_is_a_ceiling_however_many_engines_there_are() -> None:
    slow = replace(QUIET, num_units=400, driver_s=10.0)
    few, many = (simulate(replace(slow, num_machines=num), 0) for num in (10, 20))
    assert many.wall_s > 0.9 * few.wall_s > 0.9 * 390 * 10
    assert many.useful_share < few.useful_share / 1.5


@pytest.mark.parametrize("changes", [{"num_units": 0}, {"num_machines": 0}, {"unit_s": 0.0}])
def test_a_fleet_of_nothing_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a fleet has machines, engines and units"):
        replace(QUIET, **changes)
