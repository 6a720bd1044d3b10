"""The closed form, by hand."""

import pytest

from peagle.economics.prices import Price
from peagle.planning.options import Machine, estimate, machines_for


def machine(**changes: float) -> Machine:
    values = {"num_engines": 1, "devices_per_engine": 1, "tokens_per_s": 100.0, "start_s": 100.0} | changes
    price = Price.fixed(usd_per_hour=3.6, device="accelerator", num_devices=int(values["num_engines"]))
    return Machine(price=price, **values)  # type: ignore[arg-type]


SPOT = {"interruptions_per_h": 0.05, "lost_s": 60.0, "replace_s": 300.0}


def test_without_interruptions_it_is_start_and_work() -> None:
    found = estimate(machine(), 2, 720_000, provision_s=180)
    assert found is not None
    assert found.wall_s == pytest.approx(180 + 100 + 3600)
    assert found.usd == pytest.approx(2 * 3700 * 0.001)
    assert (found.device_s.load, found.device_s.busy, found.device_s.lost) == (200, 7200, 0)
    assert found.usd_per_million_tokens == pytest.approx(7.4 / 0.72)


def test_interruptions_cost_starts_work_and_waiting() -> None:
    found = estimate(machine(**SPOT), 1, 360_000)
    assert found is not None
    assert found.device_s.total == pytest.approx(3708.0, abs=0.1)  # the head of estimate.py
    assert found.wall_s == pytest.approx(3723.5, abs=0.1)
    assert found.lost_share == pytest.approx(8.0 / 3708, rel=0.01)


def test_devices_without_an_engine_are_paid_for_as_idle() -> None:
    price = Price.fixed(usd_per_hour=3.6, device="accelerator", num_devices=3)
    found = estimate(Machine(price=price, num_engines=1, devices_per_engine=2, tokens_per_s=100, start_s=0), 1, 1e5)
    assert found is not None
    assert (found.device_s.busy, found.device_s.idle) == (2000, 1000)
    assert found.usd == pytest.approx(1000 * 0.001)


@pytest.mark.parametrize("changes", [{}, SPOT, {"interruptions_per_h": 2.0, "lost_s": 30.0, "num_engines": 4}])
def test_the_fewest_machines_are_in_time_and_one_fewer_is_not(changes: dict[str, float]) -> None:
    one = machine(**changes)
    num = machines_for(one, 50e6, 7200, provision_s=180)
    assert num is not None
    assert num > 2
    for count, is_in_time in ((num, True), (num - 1, False)):
        found = estimate(one, count, 50e6, provision_s=180)
        assert found is not None
        assert (found.wall_s <= 7200 + 1e-6) is is_in_time


def test_no_number_of_machines_is_in_time_when_starting_takes_it_all() -> None:
    assert machines_for(machine(), 1e6, 270, provision_s=180) is None
    assert machines_for(machine(), 1, 281, provision_s=180) == 1


def test_interruptions_that_leave_no_work_are_said() -> None:
    assert estimate(machine(interruptions_per_h=100.0, lost_s=60.0), 1, 1e6) is None
    assert machine(interruptions_per_h=100.0, lost_s=60.0).sustained_tokens_per_s == 0


def test_a_service_pays_for_no_machine_that_is_being_replaced() -> None:
    one = machine(interruptions_per_h=12.0, replace_s=300.0, start_s=0.0)
    assert one.wall_per_paid == 2
    assert one.sustained_tokens_per_s == 50
    assert one.usd_per_sustained_h == 1.8
