import datetime
import time

import pytest

from peagle.runs.limits import Limits, MaxFailedRows, Situation, find_reached_limit, parse_deadline

NOW = datetime.datetime(2026, 11, 21, 17, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=1)))


def make_situation(**changes):
    return Situation(**{"now": 1000.0, "spent_usd": 5.0, "num_processed_rows": 50, "num_failed_rows": 3, **changes})


@pytest.mark.parametrize(("spent_usd", "is_reached"), [(9.59, False), (9.6, True), (12.0, True)])
def test_budget_reserves_the_cost_of_shutdown(spent_usd, is_reached):
    limit_reached = find_reached_limit(Limits(budget_usd=10.0, reserve_usd=0.4), make_situation(spent_usd=spent_usd))
    assert (limit_reached is not None) == is_reached
    if limit_reached:
        assert limit_reached.limit == "budget"
        assert "the budget of $10.00 is reached" in limit_reached.message
        assert "shutting the run down may cost $0.4" in limit_reached.message


@pytest.mark.parametrize(("now", "is_reached"), [(1962.9, False), (1963.0, True), (3000.0, True)])
def test_deadline_reserves_time_for_shutdown(now, is_reached):
    limit_reached = find_reached_limit(Limits(deadline_at=2000.0, reserve_s=37.0), make_situation(now=now))
    assert (limit_reached and limit_reached.limit) == ("deadline" if is_reached else None)


@pytest.mark.parametrize(
    ("text", "num_failed_rows", "num_processed_rows", "is_reached"),
    [
        ("0", 0, 10, False),
        ("0", 1, 1, True),
        ("5", 5, 5, False),
        ("5", 6, 1000, True),
        ("5%", 99, 99, False),
        ("5%", 5, 100, False),
        ("5%", 6, 100, True),
        ("2.5%", 26, 1000, True),
        ("100%", 200, 200, False),
    ],
)
def test_dead_letters_are_limited_by_number_or_share(text, num_failed_rows, num_processed_rows, is_reached):
    limits = Limits(max_failed_rows=MaxFailedRows.parse(text))
    situation = make_situation(num_failed_rows=num_failed_rows, num_processed_rows=num_processed_rows)
    limit_reached = find_reached_limit(limits, situation)
    assert (limit_reached is not None) == is_reached
    if limit_reached:
        rows = f"{num_failed_rows} of {num_processed_rows} rows"
        assert limit_reached.message == f"{rows} are dead letters, more than --max-failed-rows {text}"


@pytest.mark.parametrize("text", ["", "x", "-1", "101%", "1.5", "5 %%"])
def test_invalid_row_limit_is_refused(text):
    with pytest.raises(ValueError, match="a number of rows or a share"):
        MaxFailedRows.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        ("2h30m", "2026-11-21T20:00:00+01:00"),
        ("90s", "2026-11-21T17:31:30+01:00"),
        ("1d", "2026-11-22T17:30:00+01:00"),
        ("18:00", "2026-11-21T18:00:00+01:00"),
        ("17:30", "2026-11-22T17:30:00+01:00"),
        ("9:05:30", "2026-11-22T09:05:30+01:00"),
        ("2026-11-30T18:30:00", "2026-11-30T18:30:00+01:00"),
        ("2026-11-30T18:30:00Z", "2026-11-30T18:30:00+00:00"),
        ("2026-11-30", "2026-11-30T00:00:00+01:00"),
    ],
)
def test_deadline_is_parsed_as_a_duration_or_a_time(text, expected):
    assert parse_deadline(text, NOW) == (expected and datetime.datetime.fromisoformat(expected).timestamp())


@pytest.mark.parametrize("text", ["", "25:00", "h", "2h 30m", "soon", "10"])
def test_invalid_deadline_is_refused(text):
    with pytest.raises(ValueError, match=r"hour must be|a time of day \(18:30\)"):
        parse_deadline(text, NOW)


@pytest.fixture
def berlin_time(monkeypatch):
    """A machine in a zone whose clocks go forward on 2026-03-29 and back on 2026-10-25."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def utc_timestamp(text):
    return datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()


@pytest.mark.usefixtures("berlin_time")
@pytest.mark.parametrize(
    ("now", "text", "deadline"),
    [
        # after a clock change
        ("2026-10-20T12:00", "2026-10-30T18:30", "2026-10-30T17:30"),
        ("2026-10-30T12:00", "2027-04-01T18:30", "2027-04-01T16:30"),
        ("2026-03-28T22:00", "18:30", "2026-03-29T16:30"),
        ("2026-10-24T22:00", "18:30", "2026-10-25T17:30"),
        # a duration is a number of seconds
        ("2026-03-28T22:00", "1d", "2026-03-29T22:00"),
        ("2026-10-24T22:00", "24h", "2026-10-25T22:00"),
        # 02:30 is skipped on 2026-03-29
        ("2026-03-28T22:00", "02:30", "2026-03-29T01:30"),
        ("2026-03-28T22:00", "2026-03-29T02:30", "2026-03-29T01:30"),
        # 02:30 is repeated on 2026-10-25
        ("2026-10-24T22:00", "02:30", "2026-10-25T00:30"),
        ("2026-10-25T00:31", "02:30", "2026-10-25T01:30"),
        ("2026-10-25T01:29", "02:30", "2026-10-25T01:30"),
        ("2026-10-25T01:31", "02:30", "2026-10-26T01:30"),
        ("2026-10-24T22:00", "2026-10-25T02:30", "2026-10-25T00:30"),
        ("2026-10-25T00:31", "2026-10-25T02:30", "2026-10-25T01:30"),
        ("2026-10-26T12:00", "2026-10-25T02:30", "2026-10-25T00:30"),
        # the current time is in the repeated hour
        ("2026-10-25T01:10", "30m", "2026-10-25T01:40"),
        ("2026-10-25T01:10", "02:05", "2026-10-26T01:05"),
        ("2026-10-25T00:10", "02:05", "2026-10-25T01:05"),
        # an explicit offset has priority
        ("2026-10-20T12:00", "2026-10-30T18:30+02:00", "2026-10-30T16:30"),
    ],
)
def test_deadline_is_in_local_time_across_clock_changes(now, text, deadline):
    """`now` and `deadline` are in UTC."""
    assert parse_deadline(text, datetime.datetime.fromtimestamp(utc_timestamp(now))) == utc_timestamp(deadline)
