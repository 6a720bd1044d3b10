import contextlib
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from peagle.errors import ConfigError
from peagle.runs.lease import hold_lease
from peagle.storage import write_atomic
from pipelines.online.batches import records
from pipelines.online.batches.records import FILE_PREFIX, BatchProgress, new_id
from pipelines.online.batches.routes import Batches
from pipelines.online.batches.store import TRUST_AFTER_S, BatchStore, SteadyClock


@pytest.fixture
def disk_or_s3_store(root, clock):
    """A store on disk, then a store on S3."""
    batch_store = BatchStore(root, now=clock, monotonic=clock)
    batch_store.prepare()
    return batch_store


def test_files_of_a_key_are_listed_newest_first(disk_or_s3_store, upload, clock):
    first = upload(disk_or_s3_store, b"one\n")
    clock.now += 1
    second = upload(disk_or_s3_store, b"two\n")
    file_of_bob = upload(disk_or_s3_store, owner="bob")
    for store in (disk_or_s3_store, BatchStore(disk_or_s3_store.root, now=clock, monotonic=clock)):
        assert store.files("alice") == [second, first]
        assert store.file(first.id, "alice") == first
        assert store.file(file_of_bob.id, "alice") is None
        with store.open(first) as file:
            assert file.read() == b"one\n"
    disk_or_s3_store.remove_file(first)
    assert disk_or_s3_store.files("alice") == [second]
    with pytest.raises(FileNotFoundError):
        disk_or_s3_store.open(first)


def test_batch_is_the_same_in_every_process(disk_or_s3_store, make_batch_request, clock):
    request = make_batch_request(metadata={"a": "b"}, output_expires_s=3600)
    disk_or_s3_store.add_batch(request)
    other = BatchStore(disk_or_s3_store.root, now=clock, monotonic=clock)
    assert other.batch(request.id, "alice").request == request
    assert other.batch(request.id, "bob") is None
    progress = BatchProgress(status="in_progress", model="m", num_requests=3, errors=({"code": "x"},))
    disk_or_s3_store.save(request.id, progress)
    assert other.batch(request.id, "alice").progress == progress  # even if it was read before
    batch = disk_or_s3_store.cancel(disk_or_s3_store.batch(request.id, "alice"))
    clock.now += 5
    assert other.cancel(batch).cancelling_at == batch.cancelling_at == 100  # when it was first cancelled
    assert [item.id for item in other.unfinished()] == [request.id]
    disk_or_s3_store.save(request.id, replace(progress, status="cancelled"))
    assert other.unfinished() == []
    assert [item.id for item in other.batches("alice")] == [request.id]


def test_stopped_scheduler_cannot_overwrite_the_final_status(disk_or_s3_store, make_batch_request, clock):
    request = make_batch_request()
    disk_or_s3_store.add_batch(request)
    stopped = BatchStore(disk_or_s3_store.root, now=clock, monotonic=clock)
    stopped.begin_to_schedule()
    assert [batch.id for batch in stopped.unfinished()] == [request.id]
    disk_or_s3_store.save(request.id, BatchProgress(status="completed", output_file_id="file-1"))
    for late_status in ("in_progress", "failed"):
        stopped.save(request.id, BatchProgress(status=late_status))
        assert stopped.batch(request.id, "alice").progress.status == "completed"
    progress = BatchStore(disk_or_s3_store.root, now=clock, monotonic=clock).batch(request.id, "alice").progress
    assert (progress.status, progress.output_file_id) == ("completed", "file-1")


def test_concurrent_read_does_not_replace_newer_progress(store, make_batch_request, monkeypatch):
    batch_id = store.add_batch(make_batch_request()).id

    def read(path):  # finds nothing
        if path.parent.name == "progress":
            store.save(batch_id, BatchProgress(status="completed"))

    monkeypatch.setattr("pipelines.online.batches.store.read_json", read)
    for _ in range(2):
        assert store.batch(batch_id, "alice").progress.status == "completed"


@pytest.mark.parametrize("name", ["../orders/x", "..", "", "file-1", "batch_" + "0" * 28 + "/../x"])
def test_invalid_ids_are_not_looked_up(store, name):
    assert store.file(name, "alice") is None
    assert store.batch(name, "alice") is None


def test_batches_are_listed_newest_first(store, make_batch_request, monkeypatch):
    moments = iter([1.0, 2.0, 300.0])
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: next(moments)))
    ids = [store.add_batch(replace(make_batch_request(), id=records.new_id("batch_"))).id for _ in range(3)]
    assert [batch.id for batch in store.batches("alice")] == ids[::-1]
    assert [batch.id for batch in store.unfinished()] == ids


def test_expired_file_is_hidden(store, upload, clock):
    stored = upload(store, expires_at=150.0)
    assert store.file(stored.id, "alice") == stored
    clock.now = 151
    assert store.file(stored.id, "alice") is None


def test_interrupted_upload_leaves_nothing(store):
    def upload_half():
        with store.writer(new_id(FILE_PREFIX)) as (_, target):
            target.write(b"half")
            raise ConnectionError

    with pytest.raises(ConnectionError):
        upload_half()
    assert not list((store.root / "files").iterdir())


def test_unusable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        BatchStore(tmp_path / "file").prepare()


def create_run_directory(store, batch):
    """Create a run directory with all kinds of files that can have copies of prompts and answers, and two others."""
    run = store.run_path(batch.id)
    names = [
        "data/unit-00000000.parquet", "data/.unit-00000001.parquet.0123.tmp", "failed/unit-00000000.0123.jsonl",
        "suspects/unit-00000000.s.json", "export/jsonl/output.jsonl", "export/jsonl/errors.jsonl",
        "export/parquet/output.parquet", "export/openai-batch/output.jsonl", "export/openai-batch/errors.jsonl",
        "run.json", "ledger/session-s.parquet",
    ]  # fmt: skip
    for name in names:
        path = run
        for part in name.split("/")[:-1]:
            path = path / part
            path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / name.split("/")[-1], b"the prompt")
    return run


def paths_in(folder, *subfolders):
    result = set()
    for path in folder.iterdir():
        if path.name in ("data", "failed", "suspects", "export", "ledger", *subfolders):
            result |= {f"{path.name}/{name}" for name in paths_in(path, "jsonl", "parquet", "openai-batch")}
        else:
            result.add(path.name)
    return result


def test_deleting_an_input_deletes_its_prompts_from_the_run_directory(disk_or_s3_store, upload, make_batch_request):
    deleted, other = upload(disk_or_s3_store), upload(disk_or_s3_store)
    run_of_deleted, run_of_other = (
        create_run_directory(disk_or_s3_store, disk_or_s3_store.add_batch(make_batch_request(file.id)))
        for file in (deleted, other)
    )
    before = paths_in(run_of_other)
    disk_or_s3_store.remove_file(deleted)
    assert paths_in(run_of_deleted) == {
        "run.json", "ledger/session-s.parquet", "export/openai-batch/output.jsonl", "export/openai-batch/errors.jsonl",
    }  # fmt: skip
    assert paths_in(run_of_other) == before


@pytest.mark.parametrize("kind", ["output", "errors"])
def test_deleting_an_output_deletes_every_copy(disk_or_s3_store, make_batch_request, kind):
    batch = disk_or_s3_store.add_batch(make_batch_request())
    run = create_run_directory(disk_or_s3_store, batch)
    file_ids = disk_or_s3_store.add_outputs(batch, ("export/openai-batch/output.jsonl", 5), 5, 1.0)
    ids = dict(zip(("output", "errors"), file_ids, strict=True))
    disk_or_s3_store.remove_file(disk_or_s3_store.file(ids[kind], "alice"))
    result = paths_in(run)
    if kind == "output":
        assert not {name for name in result if name.startswith("data/") or "output" in name}
        assert {"failed/unit-00000000.0123.jsonl", "export/openai-batch/errors.jsonl"} <= result
    else:
        assert not {name for name in result if name.startswith("failed/") or "errors" in name}
        assert {"data/unit-00000000.parquet", "export/openai-batch/output.jsonl"} <= result


def test_clock_jump_does_not_delete_files(root, upload, clock):
    """Even after a restart, the store does not trust a clock jump that is less than a day old."""
    uptime = SimpleNamespace(now=50.0)
    store = BatchStore(root, now=clock, monotonic=lambda: uptime.now)
    store.prepare()
    file = upload(store, expires_at=store.clock.after(3600))
    for jump_s in (365 * 24 * 3600, -365 * 24 * 3600):
        clock.now += jump_s
        store.sweep()
        restarted = BatchStore(root, now=clock, monotonic=lambda: uptime.now)
        restarted.prepare()
        restarted.sweep()
        assert restarted.file(file.id, "alice") == store.file(file.id, "alice") == file
        clock.now -= jump_s
    uptime.now += 3600
    clock.now += 3600
    store.sweep()
    assert store.file(file.id, "alice") is None
    assert not store.contents_path(file).exists()


def test_temporary_files_are_deleted_after_a_day(store, upload):
    upload(store)
    old, new = (store.root / "files" / f".file-x.jsonl.{number}.tmp" for number in (1, 2))
    for path in (old, new):
        path.write_bytes(b"a prompt")
    os.utime(old, (1.0, 1.0))
    store.sweep()
    assert (old.exists(), new.exists()) == (False, True)


def test_upload_without_record_is_deleted_after_a_day(disk_or_s3_store, upload, clock, make_batch_request):
    recent = upload(disk_or_s3_store)
    batch = disk_or_s3_store.add_batch(make_batch_request(recent.id))
    with disk_or_s3_store.writer(new_id(FILE_PREFIX)) as (orphan, target):
        target.write(b"a prompt")
    with disk_or_s3_store.writer(f"file-{batch.id.removeprefix('batch_')}-errors") as (errors, target):
        target.write(b"the record is written once the results of the batch are collected again")
    created_at = records.created_at_of(orphan.split("/")[1])
    clock.now = created_at + 24 * 3600 - 1
    disk_or_s3_store.sweep()
    assert (disk_or_s3_store.root / "files" / orphan.split("/")[1]).exists()
    clock.now = created_at + 24 * 3600 + 1
    disk_or_s3_store.sweep()
    remaining_files = {path.name for path in (disk_or_s3_store.root / "files").glob("*.jsonl")}
    assert remaining_files == {f"{recent.id}.jsonl", errors.split("/")[1]}


def test_interrupted_deletion_can_be_repeated(disk_or_s3_store, upload, make_batch_request, monkeypatch):
    file = upload(disk_or_s3_store)
    run = create_run_directory(disk_or_s3_store, disk_or_s3_store.add_batch(make_batch_request(file.id)))

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(disk_or_s3_store, "_delete", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk_or_s3_store.remove_file(file)
    monkeypatch.undo()
    assert disk_or_s3_store.file(file.id, "alice") == file
    disk_or_s3_store.remove_file(file)
    assert disk_or_s3_store.file(file.id, "alice") is None
    assert not list((run / "data").glob("*"))


# --- the clock

YEAR_S = 365 * 24 * 3600.0
START = 1.8e9  # a Unix time


@pytest.fixture
def machine():
    """The machine's clocks: `ahead` is how far the wall clock was set forward, `uptime` is the monotonic clock."""
    return SimpleNamespace(ahead=0.0, uptime=1000.0)


@pytest.fixture
def make_clock(machine):
    def make(boot="a"):
        return SteadyClock(
            wall=lambda: START + machine.uptime + machine.ahead, monotonic=lambda: machine.uptime, boot=boot
        )

    return make


@pytest.mark.parametrize("jump_s", [YEAR_S, 60.0, -60.0, -YEAR_S])
def test_clock_jump_is_trusted_after_a_day(machine, make_clock, jump_s):
    clock = make_clock()
    before = clock()
    machine.uptime += 10
    machine.ahead = jump_s
    assert clock() == before + 10
    machine.uptime += TRUST_AFTER_S - 1
    assert clock() == before + 10 + TRUST_AFTER_S - 1
    machine.uptime += 1
    assert clock() == START + machine.uptime + jump_s


def test_jump_that_is_corrected_within_a_day_is_ignored(machine, make_clock):
    clock = make_clock()
    for _ in range(5):
        for ahead in (YEAR_S, -YEAR_S, 0.0):
            machine.ahead = ahead
            machine.uptime += TRUST_AFTER_S / 2
            assert clock() == START + machine.uptime


def test_small_clock_corrections_are_applied_immediately(machine, make_clock):
    clock = make_clock()
    for _ in range(100):
        machine.ahead += 1
        machine.uptime += 60
        assert clock() == START + machine.uptime + machine.ahead


def test_clock_continues_in_the_next_process(machine, make_clock):
    clock = make_clock()
    machine.ahead = YEAR_S
    clock()
    machine.uptime += TRUST_AFTER_S / 2
    saved_state = clock.state()
    machine.uptime += 3600  # no process runs in the meantime
    next_clock = make_clock()
    next_clock.resume(saved_state)
    assert next_clock() == START + machine.uptime
    machine.uptime += TRUST_AFTER_S / 2 - 3600
    assert next_clock() == START + machine.uptime + YEAR_S  # the jump is a day old


@pytest.mark.parametrize("boot", ["b", None])
def test_clock_continues_from_the_saved_time_after_a_reboot(machine, make_clock, boot):
    saved_state = make_clock().state()
    machine.ahead, machine.uptime = YEAR_S, 5.0
    next_clock = make_clock(boot)
    next_clock.resume(saved_state)
    assert next_clock() == saved_state["now"]
    machine.uptime += TRUST_AFTER_S
    assert next_clock() == START + machine.uptime + YEAR_S


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
def test_expiry_is_counted_from_the_later_of_the_two_clocks(machine, make_clock, jump_s):
    clock = make_clock()
    machine.ahead = jump_s
    assert clock.after(3600) == START + machine.uptime + max(0, jump_s) + 3600


def test_new_scheduler_reloads_progress(settings, runner, store, make_batch_request, monkeypatch):
    monkeypatch.setattr("pipelines.online.batches.routes._RETRY_S", 0.01)
    batch_id = store.add_batch(make_batch_request()).id
    with (
        hold_lease(store.root, expiry_s=30, command=["another"], announce=print) as lease,
        contextlib.closing(Batches(settings, runner, spent_usd=lambda key: 0.0)) as batches,
    ):
        assert batches.store.batch(batch_id, "alice").progress.status == "validating"
        store.save(batch_id, BatchProgress(status="completed"))
        lease.end()
        deadline = time.monotonic() + 20
        while not batches.store.is_scheduling and time.monotonic() < deadline:
            time.sleep(0.01)
        assert batches.store.is_scheduling
        assert batches.store.batch(batch_id, "alice").progress.status == "completed"
        assert runner.handles == []
