import json
import logging
import os
import resource
import signal
import time
from dataclasses import asdict, replace

import pytest
from usage_records import engine_session, unit_usage

from peagle.economics import ledger
from peagle.economics.ledger import (
    RequestReader,
    SessionReader,
    append_beat,
    append_request,
    is_billed,
    read_session_at,
    write_session,
)
from peagle.economics.usage import RequestUsage

SESSION = engine_session(started_at=1000.0, busy_s=60.0, num_output_tokens=600, ended=False)


def make_request(request_id, session_id="s"):
    usage = unit_usage(session_id, num_prompt_tokens=1, num_output_tokens=10)
    return RequestUsage(
        request_id=request_id, key="k", model="m", drafter=None, outcome="ok", ttft_s=None, usd=1.0, usage=usage
    )


@pytest.fixture
def limit_file_size():
    """Return a function that limits the size of the files that this process writes. None removes the limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes or limits[0], limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_free_bytes", [0, 100])
def test_full_disk_loses_only_one_record(tmp_path, limit_file_size, num_free_bytes):
    append_request(tmp_path, make_request("1"))
    append_beat(tmp_path, SESSION)
    write_session(tmp_path, replace(SESSION, last_seen_at=1180.0, busy_s=180.0))
    for path, append, record in (
        (tmp_path / "requests-s.jsonl", append_request, make_request("2")),
        (tmp_path / "beats-s.jsonl", append_beat, SESSION),
    ):
        limit_file_size(path.stat().st_size + num_free_bytes)
        with pytest.raises(OSError, match=r"No space left|File too large"):
            append(tmp_path, record)
        limit_file_size(None)
    append_request(tmp_path, make_request("3"))
    append_beat(tmp_path, replace(SESSION, last_seen_at=1120.0, busy_s=120.0))
    assert [record.request_id for record in RequestReader(tmp_path).new()] == ["1", "3"]
    (recent_part,) = SessionReader(tmp_path).since(1120.0)
    assert recent_part.busy_s == pytest.approx(60)


def test_invalid_lines_are_logged_and_skipped(tmp_path, caplog):
    torn = make_request("2").to_json()[:30]
    append_request(tmp_path, make_request("1"))
    with (tmp_path / "requests-s.jsonl").open("ab") as file:
        file.write(torn)
    append_request(tmp_path, make_request("3"))
    append_request(tmp_path, make_request("4"))
    append_request(tmp_path, make_request("1", session_id="t"))
    reader = RequestReader(tmp_path)
    with caplog.at_level(logging.ERROR):
        assert [record.request_id for record in reader.new()] == ["1", "4", "1"]
    assert "requests-s.jsonl: skipped an invalid line" in caplog.text
    append_request(tmp_path, make_request("5"))
    assert [record.request_id for record in reader.new()] == ["5"]


@pytest.mark.parametrize(
    "change", [{"usd": float("nan")}, {"usd": float("inf")}, {"usd": -1.0}, {"num_choices": 0}, {"num_choices": 1.5}]
)
def test_lines_with_invalid_costs_or_counts_are_skipped(tmp_path, caplog, change):
    append_request(tmp_path, make_request("1"))
    line = json.dumps({**json.loads(make_request("2").to_json()), **change})
    with (tmp_path / "requests-s.jsonl").open("a") as file:
        file.write(line + "\n")
    assert [record.request_id for record in RequestReader(tmp_path).new()] == ["1"]
    assert next(iter(change)) in caplog.text


def test_heartbeat_of_any_time_is_found(tmp_path, caplog):
    def beat(minute):  # the engine is idle for the first thousand minutes
        busy_s = 60.0 * max(0, minute - 1000)
        return replace(SESSION, last_seen_at=1000.0 + 60 * minute, busy_s=busy_s, idle_s=60.0 * minute - busy_s)

    lines = [json.dumps(asdict(beat(minute))).encode() + b"\n" for minute in range(1000, 2000)]
    (tmp_path / "beats-s.jsonl").write_bytes(b"".join(lines) + b'{"torn')
    write_session(tmp_path, beat(2000))
    reader = SessionReader(tmp_path)
    for minutes_ago in (1, 2, 500, 999, 999.5, 1000):
        (recent_part,) = reader.since(beat(2000).last_seen_at - 60 * minutes_ago)
        assert recent_part.busy_s == pytest.approx(60 * minutes_ago)
    assert not caplog.text


def test_unchanged_session_files_are_not_read_again(tmp_path, monkeypatch):
    write_session(tmp_path, SESSION)
    write_session(tmp_path, replace(SESSION, session_id="t"))
    reader = SessionReader(tmp_path)
    files_read, original = [], ledger.read_session_file
    monkeypatch.setattr(ledger, "read_session_file", lambda path: files_read.append(path.name) or original(path))
    sessions_before = reader.all()
    assert files_read == ["session-s.parquet", "session-t.parquet"]
    write_session(tmp_path, replace(SESSION, session_id="t", busy_s=1.0, idle_s=59.0))
    assert [session.busy_s for session in reader.all()] == [sessions_before[0].busy_s, 1.0]
    assert files_read[2:] == ["session-t.parquet"]
    (tmp_path / "session-s.parquet").unlink()
    assert [session.session_id for session in reader.all()] == ["t"]


def test_records_are_returned_after_a_failed_read(tmp_path):
    append_request(tmp_path, make_request("1", session_id="a"))
    append_request(tmp_path, make_request("2", session_id="b"))
    reader = RequestReader(tmp_path)
    (tmp_path / "requests-b.jsonl").rename(tmp_path / "b")
    (tmp_path / "requests-b.jsonl").mkdir()  # cannot be read
    with pytest.raises(OSError, match="directory"):
        reader.new()
    (tmp_path / "requests-b.jsonl").rmdir()
    (tmp_path / "b").rename(tmp_path / "requests-b.jsonl")
    assert [record.request_id for record in reader.new()] == ["1", "2"]


def test_request_is_billed_if_another_session_has_charged_it(tmp_path):
    def is_billed_by_another_session(request_id):
        return is_billed(tmp_path, request_id, since=time.time(), session_id="own")

    free = replace(make_request("free", "one"), usd=0.0, outcome="failed")
    for record in (make_request("r", "one"), free, make_request("other", "two"), make_request("mine", "own")):
        append_request(tmp_path, record)
    assert all(is_billed_by_another_session(name) for name in ("r", "other"))
    assert not any(is_billed_by_another_session(name) for name in ("free", "mine", "", "k", "torn"))
    with (tmp_path / "requests-one.jsonl").open("ab") as file:
        file.write(make_request("torn", "one").to_json())
    assert not is_billed_by_another_session("torn")


def test_is_billed_reads_only_the_ends_of_recent_files(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "_TAIL_BYTES", 3 * len(make_request("r-0").to_json()))
    for number in range(9):
        append_request(tmp_path, make_request(f"r-{number}"))

    def is_billed_by_another_session(number, since):
        return is_billed(tmp_path, f"r-{number}", since=since, session_id="own")

    assert [is_billed_by_another_session(number, time.time()) for number in (0, 7, 8)] == [False, True, True]
    os.utime(tmp_path / "requests-s.jsonl", (1000, 1000))
    assert [is_billed_by_another_session(8, since) for since in (900, 1059, 1061)] == [True, True, False]


@pytest.mark.parametrize("minute", [0, 1, 100, 598, 599])
@pytest.mark.parametrize("has_bad_lines", [False, True])
def test_session_at_time_is_interpolated(tmp_path, minute, has_bad_lines):
    """There is a heartbeat each minute for ten hours. The engine is busy for the fraction n / 1000 of minute n."""
    busy_s, beats = 0.0, []
    for number in range(1, 600):
        busy_s += 60 * number / 1000
        lifetime_s = 60.0 * number
        beats.append(replace(SESSION, last_seen_at=1000 + lifetime_s, busy_s=busy_s, idle_s=lifetime_s - busy_s))
        append_beat(tmp_path, beats[-1])
        if has_bad_lines and number % 3 == 0:
            with (tmp_path / "beats-s.jsonl").open("ab") as file:
                file.write(b'{"torn": ' + b"x" * (number % 7) + b"\n")
    last = replace(beats[-1], last_seen_at=1000 + 36_000.0 + 1, idle_s=36_001 - busy_s, ended=True)
    session = read_session_at(tmp_path, last, 1000 + 60.0 * minute + 30)
    busy_by_minute = [0.0, *(beat.busy_s for beat in beats)]
    if minute < 599:
        busy_s = (busy_by_minute[minute] + busy_by_minute[minute + 1]) / 2
    assert session.busy_s == pytest.approx(busy_s)
    assert session.last_seen_at == pytest.approx(1000 + 60.0 * minute + 30)
