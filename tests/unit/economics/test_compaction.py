import threading
from dataclasses import replace
from random import Random

import pytest
from usage_records import engine_session

from peagle.economics import compaction
from peagle.economics.compaction import compact
from peagle.economics.ledger import (
    RequestReader,
    SessionReader,
    append_beat,
    append_request,
    read_session_at,
    read_sessions,
    write_batch,
    write_session,
)
from peagle.economics.request_work import RequestTotalsReader, read_request_totals
from peagle.errors import PeagleError
from peagle.storage import storage_path, write_atomic
from tests.unit.pipelines.online.ledgers import make_request_usage

DAY_S = 86_400.0
NOW = 100 * DAY_S


class SimulatedKill(BaseException):
    """Ends compaction as kill -9 would: nothing in peagle catches it."""


def make_session(session_id, *, end, lifetime_s=120.0, ended=True):
    times = {"started_at": end - lifetime_s, "last_seen_at": end, "busy_s": lifetime_s}
    return engine_session(session_id, num_output_tokens=int(lifetime_s), ended=ended, usd_per_device_s=0.01, **times)


def write_engine(folder, session_id, *, end, num_requests=5, ended=True):
    """Write the ledger files of an engine that ran for two minutes, with a heartbeat after one minute."""
    append_beat(folder, make_session(session_id, end=end - 60, lifetime_s=60.0, ended=False))
    append_beat(folder, make_session(session_id, end=end, ended=ended))
    write_session(folder, make_session(session_id, end=end, ended=ended))
    for number in range(num_requests):
        add_request(folder, session_id, number, end)


def add_request(folder, session_id, number, end):
    append_request(
        folder,
        make_request_usage(f"{session_id}-{number}", session_id=session_id, usd=1.0, started_at=1.0, finished_at=end),
    )


@pytest.fixture
def ledger(tmp_path):
    """The files of an ended engine, of a killed engine with an incomplete last line, and of a batch.

    Two more engines might still write: one is silent without having ended, and one has just ended.
    """
    write_engine(tmp_path, "a", end=NOW - 7200)
    write_engine(tmp_path, "killed", end=NOW - 2 * DAY_S, ended=False)
    with (tmp_path / "requests-killed.jsonl").open("ab") as file:
        file.write(b'{"version": 1, "reque')
    batch = make_request_usage("batch_1", session_id="batch_1", usd=7.0, started_at=1.0, finished_at=NOW - 2 * DAY_S)
    write_batch(tmp_path, batch)
    write_engine(tmp_path, "silent", end=NOW - 7200, ended=False)
    write_engine(tmp_path, "just ended", end=NOW - 60)
    return tmp_path


def contents(folder):
    """Return what each reader of a ledger returns, starting with the request ids."""
    sessions = sorted(read_sessions(folder), key=lambda session: session.session_id)
    return (
        sorted(request.request_id for request in RequestReader(folder).new()),
        read_request_totals(folder),
        sessions,
        sorted(SessionReader(folder).all(), key=lambda session: session.session_id),
        [
            read_session_at(folder, session, session.last_seen_at - seconds)
            for session in sessions
            for seconds in (30, 60, 90)
        ],
    )


def file_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_compaction_merges_files_and_keeps_their_records(ledger):
    before = contents(ledger)
    assert len(before[0]) == 21  # five of each engine, and one of the batch
    result = compact(ledger, NOW)
    # Seven files are replaced by five: merged requests, heartbeats and sessions, and two indexes.
    assert (result.num_before, result.num_after) == (13, 11)
    assert contents(ledger) == before
    assert [name for name in file_names(ledger) if "merged" not in name] == [
        f"{kind}-{name}.{ending}"
        for kind, ending in (("beats", "jsonl"), ("requests", "jsonl"), ("session", "parquet"))
        for name in ("just ended", "silent")
    ]
    assert compact(ledger, NOW) == replace(result, num_before=11), "another compaction changes nothing"


def test_later_files_are_merged_into_existing_ones(ledger):
    compact(ledger, NOW)
    before = contents(ledger)
    result = compact(ledger, NOW + 2 * DAY_S)
    assert (result.num_after, contents(ledger)) == (5, before)  # two days later, all engines count as ended


def record_file_operations(monkeypatch, kill_at):
    """Make compaction raise SimulatedKill before it writes or deletes its file number `kill_at`.

    Returns a list to which each earlier write or deletion adds the file's name.
    """
    operations = []
    for name in ("write_atomic", "remove"):
        original = getattr(compaction, name)

        def record(*arguments, original=original):
            if len(operations) == kill_at:
                raise SimulatedKill
            operations.append(arguments[0].name)
            original(*arguments)

        monkeypatch.setattr(compaction, name, record)
    return operations


def test_nothing_is_lost_if_compaction_is_killed(ledger, tmp_path_factory, monkeypatch):
    before = contents(ledger)
    with monkeypatch.context() as patch:
        operations = record_file_operations(patch, None)
        compact(copy_ledger(ledger, tmp_path_factory.mktemp("whole")), NOW)
    assert len(operations) == 12, "five files are written, and seven deleted"
    for kill_at in range(len(operations)):
        folder = copy_ledger(ledger, tmp_path_factory.mktemp("killed"))
        reader, totals_reader = RequestReader(folder), RequestTotalsReader(folder)
        first_request = next(reader.iter_new())
        assert sum(work.num_requests for _, work in totals_reader.new()) == 21
        with monkeypatch.context() as patch:
            record_file_operations(patch, kill_at)
            with pytest.raises(SimulatedKill):
                compact(folder, NOW)
        assert contents(folder) == before, f"killed before operation {kill_at}"
        assert sorted([first_request.request_id, *(request.request_id for request in reader.new())]) == before[0]
        add_request(folder, "silent", 99, NOW)
        assert sum(work.num_requests for _, work in totals_reader.new()) == 1
        restarted = RequestReader(folder)
        assert restarted.resume(reader.marks()), "the positions of the first reader are still valid"
        assert [request.request_id for request in restarted.new()] == ["silent-99"]
        compact(folder, NOW)
        assert len(contents(folder)[0]) == 22
        assert len([name for name in file_names(folder) if "merged" not in name]) == 6, f"killed at {kill_at}"


def copy_ledger(ledger, folder):
    for path in ledger.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_records_written_after_compaction_are_read_once(ledger):
    compact(ledger, NOW)
    reader, totals_reader = RequestReader(ledger), RequestTotalsReader(ledger)
    assert (len(reader.new()), sum(work.num_requests for _, work in totals_reader.new())) == (21, 21)
    for number in range(20, 22):
        add_request(ledger, "killed", number, NOW)
    assert [request.request_id for request in reader.new()] == ["killed-20", "killed-21"]
    assert sum(work.num_requests for _, work in totals_reader.new()) == 2
    write_session(ledger, make_session("killed", end=NOW, lifetime_s=200.0, ended=False))
    assert {session.session_id: session.busy_s for session in read_sessions(ledger)}["killed"] == 200.0
    before = contents(ledger)
    compact(ledger, NOW + 2 * DAY_S)
    assert (contents(ledger), reader.new(), list(totals_reader.new())) == (before, [], [])


def test_file_that_grows_during_compaction_is_kept(ledger, monkeypatch):
    original = compaction.write_atomic

    def write_and_append(path, data):
        original(path, data)
        if path.name.endswith(".jsonl"):
            with (ledger / "requests-a.jsonl").open("ab") as file:
                file.write(make_request_usage("late", session_id="a").to_json() + b"\n")
            monkeypatch.setattr(compaction, "write_atomic", original)

    monkeypatch.setattr(compaction, "write_atomic", write_and_append)
    compact(ledger, NOW)
    assert "requests-a.jsonl" in file_names(ledger)
    assert len(RequestReader(ledger).new()) == 22
    assert sum(work.num_requests for work in read_request_totals(ledger).values()) == 22


@pytest.mark.parametrize("seed", range(2))
def test_readers_read_each_line_once_during_compactions(tmp_path, seed):
    random, stop, request_ids = Random(seed), threading.Event(), []
    reader, totals_reader, num_requests = RequestReader(tmp_path), RequestTotalsReader(tmp_path), 0

    def compact_repeatedly():
        now = NOW
        while not stop.is_set():
            now += DAY_S
            compact(tmp_path, now)

    thread = threading.Thread(target=compact_repeatedly)
    write_engine(tmp_path, "first", end=NOW - 7200)
    thread.start()
    for number in range(12):
        write_engine(tmp_path, f"s{number}", end=NOW - 7200, num_requests=random.randrange(4))
        request_ids += [request.request_id for request in reader.new()]
        num_requests += sum(work.num_requests for _, work in totals_reader.new())
        assert len(read_sessions(tmp_path)) == number + 2
    stop.set()
    thread.join()
    request_ids += [request.request_id for request in reader.new()]
    assert sorted(request_ids) == sorted(request.request_id for request in RequestReader(tmp_path).new())
    assert (
        len(set(request_ids))
        == len(request_ids)
        == num_requests + sum(work.num_requests for _, work in totals_reader.new())
    )


def test_compaction_of_a_ledger_on_s3(ledger, s3):
    folder = storage_path("s3://bucket/serve/ledger")
    for path in ledger.iterdir():
        write_atomic(folder / path.name, path.read_bytes())
    before, sessions = read_request_totals(folder), read_sessions(folder)
    result = compact(folder, NOW)
    assert (result.num_before, result.num_after) == (13, 11)
    assert read_request_totals(folder) == before
    assert sorted(read_sessions(folder), key=str) == sorted(sessions, key=str)


def test_damaged_index_of_a_merged_file_is_an_error(ledger):
    (ledger / "requests-merged-x.jsonl").write_bytes(b"")
    (ledger / "requests-merged-x.jsonl.index").write_text("{}")
    with pytest.raises(PeagleError, match="is damaged"):
        read_request_totals(ledger)
