import pytest
from usage_records import unit_usage

from peagle.runs.progress import Tally, seconds_left

UNIT = unit_usage(num_rows=8, num_failed_rows=2, num_output_tokens=400, busy_s=4.0, finished_at=5.0)


def test_time_left_needs_a_heartbeat():
    tally = Tally(num_rows_planned=100)
    tally.add(UNIT)
    tally.observe(0.0, num_engines=1, tokens_per_s=0.0)  # no heartbeat since the engine started
    assert "left" not in tally.line()
    tally.observe(0.0, num_engines=1, tokens_per_s=100.0)
    assert "36.0 s left" in tally.line()  # 90 rows of 40 tokens at 100/s


def test_no_time_left_after_the_last_row():
    tally = Tally(num_rows_planned=10)
    tally.add(UNIT)
    tally.observe(0.0, num_engines=1, tokens_per_s=100.0)
    assert "left" not in tally.line()


@pytest.mark.parametrize("measured", [(5, 0, 0, 10.0), (5, 5, 0, 10.0), (5, 5, 100, 0.0), (0, 5, 100, 10.0)])
def test_unknown_time_left_is_none(measured):
    assert seconds_left(*measured) is None
