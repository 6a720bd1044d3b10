import pytest

from peagle.runs.meter import BilledMeter, EngineMeter, is_lent, new_session_id


@pytest.fixture
def meter(clock):
    return EngineMeter(monotonic=clock)


def test_busy_seconds_are_divided_by_the_requests_of_each_unit(meter, clock):
    meter.ready(0)
    meter.start(1)
    clock.now += 2
    for _ in range(3):
        meter.start(2)
    clock.now += 2
    assert meter.snapshot().busy_s == pytest.approx(4)
    assert meter.pop_busy_s(1) == pytest.approx(2.5)
    assert meter.pop_busy_s(2) == pytest.approx(1.5)
    assert meter.pop_busy_s(2) == 0


def test_every_second_counts_in_one_state(meter, clock):
    clock.now += 30
    meter.ready(compile_s=12)
    clock.now += 5
    meter.start(7)
    clock.now += 3
    meter.finish(7, 40)
    clock.now += 2
    totals = meter.snapshot()
    assert (totals.load_s, totals.compile_s, totals.idle_s, totals.busy_s) == (18, 12, 7, 3)
    assert totals.elapsed_s == 40
    assert totals.num_output_tokens == 40


def test_compile_time_is_at_most_the_time_to_start(meter, clock):
    clock.now += 10
    meter.ready(compile_s=99)
    assert (meter.snapshot().load_s, meter.snapshot().compile_s) == (0, 10)


def test_meter_of_a_borrowed_engine_advances_with_billed_seconds():
    meter = BilledMeter()
    meter.start(1)
    meter.bill(2.0)
    meter.finish(1, 7)
    meter.bill(0.5)  # for a cancelled row
    totals = meter.snapshot()
    assert (totals.elapsed_s, totals.load_s, totals.busy_s, totals.idle_s) == (2.5, 0.0, 2.0, 0.5)
    assert (meter.pop_busy_s(1), totals.num_output_tokens) == (2.0, 7)
    assert [is_lent(new_session_id(is_lent=lent)) for lent in (False, True)] == [False, True]
