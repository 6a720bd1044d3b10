import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.usage import (
    SESSION_KEY,
    UNIT_KEY,
    RequestUsage,
    UnitUsage,
    interpolate_session,
    session_since,
    sessions_from_table,
    sessions_to_table,
)
from peagle.errors import PeagleError
from peagle.speculation import SpeculationStats

UNIT = unit_usage(
    "a1", num_rows=16, num_failed_rows=1, num_prompt_tokens=3000, num_cached_tokens=500, num_output_tokens=2048,
    busy_s=43.25, started_at=1_780_000_000.123456, finished_at=1_780_000_050.5,
    speculation=SpeculationStats(num_drafts=1280, num_draft_tokens=6400, accepted_per_position=(614, 128, 26)),
)  # fmt: skip
SESSION = engine_session(
    "a1", num_devices=2, started_at=1_780_000_000.25, load_s=20.0, compile_s=10.0, busy_s=60.0, idle_s=10.0,
    num_output_tokens=2500,
)  # fmt: skip


def test_unit_round_trip_in_parquet_metadata(tmp_path):
    table = pa.table({"id": ["x"]}).replace_schema_metadata({UNIT_KEY: UNIT.to_json()})
    pq.write_table(table, tmp_path / "unit.parquet")
    metadata = pq.read_metadata(tmp_path / "unit.parquet").metadata
    assert UnitUsage.from_json(metadata[UNIT_KEY]) == UNIT


def test_session_round_trip_in_parquet(tmp_path):
    other = dataclasses.replace(SESSION, session_id="b2", device="accelerator", ended=False)
    for session in (SESSION, other):
        pq.write_table(sessions_to_table([session]), tmp_path / f"session-{session.session_id}.parquet")
    tables = [pq.read_table(path) for path in sorted(tmp_path.iterdir())]
    assert sessions_from_table(tables[0]) == [SESSION]
    assert sessions_from_table(pa.concat_tables(tables)) == [SESSION, other]


def test_session_table_without_the_self_check_column_is_read():
    checked = dataclasses.replace(SESSION, self_check='{"outcome": "passed"}')
    assert sessions_from_table(sessions_to_table([checked])) == [checked]
    assert sessions_from_table(sessions_to_table([checked]).drop_columns(["self_check"])) == [SESSION]


def changed_record(**changes):
    """Return the record of a unit with these changes; None removes a field."""
    record = json.loads(UNIT.to_json())
    for name, value in changes.items():
        if value is None:
            del record[name]
        else:
            record[name] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "usage record"),
        ("[1]", "version None is not supported"),
        (changed_record(version=2), "version 2 is not supported; this peagle reads version 1"),
        (changed_record(colour="red"), "unknown fields colour"),
        (changed_record(busy_s=None, num_rows=None), "missing fields busy_s, num_rows"),
        (changed_record(num_rows=1.5), "num_rows must be of type int"),
        (changed_record(num_rows=-1), "num_rows cannot be negative"),
        (changed_record(session_id=7), "session_id must be of type str"),
        (changed_record(busy_s=float("nan")), "busy_s must be a finite number"),
        (changed_record(num_cached_tokens=3001), "3001 cached tokens exceed 3000 prompt tokens"),
        (changed_record(finished_at=1.0), "finished before it started"),
        (changed_record(speculation={"num_drafts": 1}), "speculation counts must have"),
    ],
)
def test_malformed_unit_record_is_refused(data, reason):
    with pytest.raises(PeagleError, match=reason) as error:
        UnitUsage.from_json(data)
    assert error.value.message.startswith("not the usage record of a unit")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"idle_s": 10.1}, "add up to 100.1 s, but the session lasted 100.0 s"),
        ({"busy_s": -60.0}, "busy_s must be"),
        ({"device": "gpu"}, "not one of accelerator, vcpu"),
        ({"num_devices": 0}, "at least one device"),
        ({"ended": 1}, "ended must be of type bool"),
        ({"num_output_tokens": -1}, "cannot be negative"),
    ],
)
def test_invalid_sessions_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(SESSION, **changes)


def with_column(table, name, values):
    return table.set_column(table.column_names.index(name), name, [values])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.replace_schema_metadata(None), "version '' is not supported"),
        (lambda table: table.replace_schema_metadata({SESSION_KEY: b"2"}), "version '2' is not supported"),
        (lambda table: table.drop_columns(["idle_s"]), "expected the columns"),
        (lambda table: table.append_column("colour", [["red"]]), "expected the columns"),
        (lambda table: with_column(table, "session_id", [7]), "expected the columns"),
        (lambda table: with_column(table, "idle_s", [11.0]), "add up to"),
        (lambda table: with_column(table, "idle_s", pa.array([None], pa.float64())), "idle_s must be"),
    ],
)
def test_malformed_session_table_is_refused(change, reason):
    with pytest.raises(PeagleError, match=reason) as error:
        sessions_from_table(change(sessions_to_table([SESSION])))
    assert error.value.message.startswith("not a record of engine sessions")


REQUEST = RequestUsage(
    request_id="r1", key="alice", model="m", drafter=None, outcome="cut", ttft_s=0.25, usd=0.001,
    usage=dataclasses.replace(UNIT, num_rows=1, num_failed_rows=0),
)  # fmt: skip


def test_request_round_trip():
    assert b"\n" not in REQUEST.to_json()
    assert RequestUsage.from_json(REQUEST.to_json()) == REQUEST


@pytest.mark.parametrize("change", [{"version": 2}, {"prompt": "secret"}, {"usage": {}}])
def test_invalid_request_record_is_refused(change):
    with pytest.raises(PeagleError):
        RequestUsage.from_json(json.dumps(json.loads(REQUEST.to_json()) | change))


def test_usage_of_units_of_one_session_is_added():
    both = UNIT + dataclasses.replace(UNIT, started_at=UNIT.started_at - 5)
    assert (both.num_rows, both.num_output_tokens, both.busy_s) == (32, 4096, 86.5)
    assert (both.started_at, both.finished_at) == (UNIT.started_at - 5, UNIT.finished_at)
    with pytest.raises(ValueError, match="different sessions"):
        UNIT + dataclasses.replace(UNIT, session_id="b2")


def test_session_since_is_the_part_after_a_heartbeat():
    earlier = dataclasses.replace(
        SESSION, last_seen_at=SESSION.started_at + 50, busy_s=20.0, idle_s=0.0, num_output_tokens=800, ended=False
    )
    remainder = session_since(SESSION, earlier)
    assert (remainder.load_s, remainder.compile_s, remainder.busy_s, remainder.idle_s) == (0, 0, 40, 10)
    assert remainder.started_at == pytest.approx(earlier.last_seen_at)
    assert remainder.num_output_tokens == 1700


def test_session_since_a_heartbeat_before_the_engine_was_ready():
    loading = dataclasses.replace(
        SESSION, last_seen_at=SESSION.started_at + 25, load_s=25.0, compile_s=0.0, busy_s=0.0, idle_s=0.0
    )
    remainder = session_since(SESSION, dataclasses.replace(loading, num_output_tokens=0))
    assert (remainder.load_s, remainder.compile_s, remainder.busy_s, remainder.idle_s) == (0, 5, 60, 10)
    assert remainder.started_at == pytest.approx(loading.last_seen_at)


def test_session_is_interpolated_between_heartbeats():
    earlier = dataclasses.replace(
        SESSION, last_seen_at=SESSION.started_at + 60, busy_s=30.0, idle_s=0.0, num_output_tokens=1000, ended=False
    )
    after = interpolate_session(SESSION.started_at + 70, earlier, SESSION)
    assert (after.load_s, after.compile_s, after.busy_s, after.idle_s) == pytest.approx((20, 10, 37.5, 2.5))
    assert (after.last_seen_at, after.num_output_tokens, after.ended) == (SESSION.started_at + 70, 1375, False)
    before = interpolate_session(SESSION.started_at + 30, None, earlier)  # there is no heartbeat before this time
    assert (before.load_s, before.compile_s, before.busy_s, before.num_output_tokens) == pytest.approx((10, 5, 15, 500))
