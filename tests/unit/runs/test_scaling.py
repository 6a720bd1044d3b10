import pytest
from usage_records import engine_session

from peagle.runs.scaling import EngineRange, is_worth_loading, max_concurrent_engines


def make_session(*, started_at=0.0, load_s=60.0, busy_s=100.0):
    return engine_session(started_at=started_at, load_s=load_s, busy_s=busy_s, num_output_tokens=1, ended=False)


@pytest.mark.parametrize("text", ["0", "3:2", "0:2", "-1", "1:2:3", "a", "1:", ""])
def test_invalid_engine_range_is_refused(text):
    with pytest.raises(ValueError, match="a number of engines, or MIN:MAX"):
        EngineRange.parse(text)


@pytest.mark.parametrize(
    ("num_possible", "num_units", "expected"), [(1, 1000, 2), (5, 1000, 5), (20, 1000, 8), (20, 30, 3), (20, 1, 2)]
)
def test_number_of_engines_at_start_is_limited_by_machines_and_units(num_possible, num_units, expected):
    assert EngineRange(2, 8).initial_number(num_possible, num_units, 10) == expected


def test_engine_loads_if_it_works_longer_than_it_loads():
    # Two engines loaded for 60 s. Then each worked for 100 s, and both together did 20 parts of the work.
    sessions = [make_session(), make_session()]
    assert is_worth_loading(sessions, 2, 20, 40)  # they need 200 s for 40 parts: a third one would work 93 s
    assert not is_worth_loading(sessions, 2, 20, 25)  # they need 125 s for 25 parts: it would work only 43 s
    assert not is_worth_loading(sessions, 2, 20, 0)


def test_unknown_times_do_not_delay_loading():
    assert is_worth_loading([], 1, 5, 1)
    assert is_worth_loading([make_session(busy_s=0.0)], 1, 5, 1)
    assert is_worth_loading([make_session()], 1, 0, 1)
    assert is_worth_loading([make_session()], 0, 5, 1)


def test_maximum_number_of_concurrent_engines():
    sessions = [make_session(started_at=start, load_s=0.0, busy_s=10.0) for start in (0.0, 5.0, 9.0, 20.0)]
    assert max_concurrent_engines(sessions) == 3
    assert max_concurrent_engines([]) == 0
