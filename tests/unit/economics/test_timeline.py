import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.timeline import MAX_ENGINES, NUM_STEPS, UnitTimes

PRICE = Price.fixed(usd_per_hour=36.0, device="vcpu", num_devices=1)  # a cent a second


def make_session(name="a", engine=0, *, start=1000.0, load=20.0, compile_s=10.0, busy=50.0, idle=20.0, ended=True):
    times = {"started_at": start, "load_s": load, "compile_s": compile_s, "busy_s": busy, "idle_s": idle}
    return engine_session(name, engine_index=engine, ended=ended, **times)


def make_unit_usage(name, start, end, *, tokens=100, busy_s=None):
    busy_s = end - start if busy_s is None else busy_s
    return unit_usage(name, num_output_tokens=tokens, busy_s=busy_s, started_at=start, finished_at=end)


def make_timeline(units, sessions):
    times = UnitTimes()  # `record` yields the units that `account` adds up
    total = account(times.record(units), sessions, PRICE)
    return total, times.timeline(sessions, PRICE)


def test_states_of_an_engine_over_time():
    units = [make_unit_usage("a", 1030, 1050), make_unit_usage("a", 1045, 1060)]
    _, timeline = make_timeline(units, [make_session(busy=50, idle=20)])
    (engine,) = timeline["engines"]
    # 35 of the 50 busy seconds are committed; the last 15 are lost.
    assert engine["spans"] == [
        ("load", 0.0, 20.0), ("compile", 20.0, 30.0), ("busy", 30.0, 60.0), ("idle", 60.0, 85.0), ("lost", 85.0, 100.0),
    ]  # fmt: skip
    assert engine["seconds"] == {"load": 20.0, "compile": 10.0, "busy": 35.0, "idle": 20.0, "lost": 15.0}


def test_timeline_adds_up_to_the_account():
    units = [make_unit_usage("a", 1030, 1080, tokens=500), make_unit_usage("b", 1035, 1035, tokens=7)]
    total, timeline = make_timeline(units, [make_session(), make_session("b", 1, start=1005)])
    num_tokens = sum(timeline["tokens_per_s"]) * timeline["step_s"]
    assert num_tokens == pytest.approx(total.num_output_tokens, abs=0.1)
    assert timeline["usd"][-1] == pytest.approx(total.total_usd)
    assert timeline["usd"] == sorted(timeline["usd"])
    assert len(timeline["usd"]) == len(timeline["tokens_per_s"]) == NUM_STEPS


def test_timeline_omits_pauses_between_sessions():
    units = [make_unit_usage("a", 1030, 1080), make_unit_usage("b", 9030, 9080)]
    _, timeline = make_timeline(units, [make_session(), make_session("b", start=9000)])
    assert timeline["total_s"] == 200.0
    assert timeline["pauses"] == [{"at_s": 100.0, "lasted_s": 7900.0}]
    (engine,) = timeline["engines"]
    assert engine["num_starts"] == 2
    assert [span[1] for span in engine["spans"] if span[0] == "load"] == [0.0, 100.0]


def test_killed_engine_is_shown_until_its_last_commit():
    units = [make_unit_usage("a", 1030, 1150), make_unit_usage("a", 1040, 1060)]  # the first unit is committed last
    _, timeline = make_timeline(units, [make_session(busy=10, idle=0, ended=False)])
    assert timeline["total_s"] == 150.0
    assert timeline["engines"][0]["spans"][-1] == ("busy", 30.0, 150.0)


def test_timeline_of_many_engines_and_units_is_bounded():
    engines = [make_session(f"s{n}", n, busy=7000, idle=20) for n in range(2 * MAX_ENGINES)]
    units = [make_unit_usage(engine.session_id, 1030 + 7 * n, 1035 + 7 * n) for engine in engines for n in range(1000)]
    _, timeline = make_timeline(units, engines)
    assert timeline["num_engines"] == 2 * MAX_ENGINES
    assert len(timeline["engines"]) == MAX_ENGINES
    assert max(len(engine["spans"]) for engine in timeline["engines"]) <= 500


def test_timeline_without_engine_time_is_none():
    assert make_timeline([], [make_session(load=0, compile_s=0, busy=0, idle=0)])[1] is None
    assert UnitTimes().timeline([], PRICE) is None
