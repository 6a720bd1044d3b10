import io
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from usage_records import unit_usage

from peagle.errors import ConfigError, PeagleError, RunInUse, StorageError
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import hold_lease
from peagle.runs.plan import Retry
from peagle.runs.prepare import plan_retry
from peagle.runs.suspects import Note, UnitNotes
from peagle.storage import storage_path, write_atomic


def make_usage(**changes):
    return unit_usage("s", **{"num_rows": 2, "num_prompt_tokens": 10, "num_output_tokens": 20, **changes})


def hold(run):
    return hold_lease(run.root, expiry_s=30, command=["peagle"], announce=print)


def make_run(root, plan):
    run = RunDirectory(root)
    run.create({"schema": 1}, plan)
    return run


@pytest.fixture
def run(root, one_unit_plan):
    return make_run(root, one_unit_plan)


@pytest.fixture
def local_run(tmp_path, one_unit_plan):
    return make_run(tmp_path / "run", one_unit_plan)


def read_unit(run, unit):
    return pq.read_table(io.BytesIO(run.unit_path(unit).read_bytes()))


ROWS = pa.table({"id": ["0", "1"], "response": ["a", "b"]})


def test_unit_is_committed_when_its_file_exists(run):
    assert run.committed() == set()
    assert run.commit(0, ROWS, make_usage(), [])
    assert run.committed() == {0}
    assert read_unit(run, 0).to_pylist() == ROWS.to_pylist()
    assert list(run.usages()) == [make_usage()]


def test_first_commit_wins(run):
    first = [{"id": "1", "reason": "first"}]
    assert run.commit(0, ROWS.slice(0, 1), make_usage(num_rows=1, num_failed_rows=1), first)
    assert not run.commit(0, ROWS, make_usage(num_rows=2), [{"id": "1", "reason": "second"}])
    assert read_unit(run, 0).num_rows == 1
    assert list(run.dead_letters()) == first
    assert len(list(run.failed.iterdir())) == 1


def test_files_of_killed_attempts_are_ignored_and_removed(run):
    write_atomic(run.failed / "unit-00000000.deadbeef.jsonl", b'{"id": "0", "reason": "orphan"}\n')
    UnitNotes(run.suspects, 0, "session").write(Note(rows=(1,), alone=True, died=True))
    run.commit(0, ROWS, make_usage(), [])
    assert list(run.dead_letters()) == []
    assert run.remove_leftovers() == 1
    assert list(run.failed.iterdir()) == []


def test_open_removes_temporary_files(local_run):
    leftover = local_run.data / ".unit-00000000.parquet.0123.tmp"
    leftover.touch()
    local_run.open()
    assert not leftover.exists()


def test_folder_with_other_files_is_refused(tmp_path, local_run, s3):
    (tmp_path / "thesis.tex").touch()
    write_atomic(storage_path("s3://bucket/other/chapters/one.tex"), b"")
    for root in (tmp_path, "s3://bucket/other"):
        with pytest.raises(ConfigError, match="has other files"):
            RunDirectory(root).create({}, local_run.plan())


@pytest.mark.parametrize("existing_file", ["plan.0123456789ab.parquet", "run.json"])
def test_next_driver_completes_a_partly_created_directory(tmp_path, local_run, existing_file):
    run = RunDirectory(tmp_path / "killed")
    for folder in (".lease", "data", "failed"):
        (run.root / folder).mkdir(parents=True)
    if existing_file == "run.json":
        (run.root / "plan.0123456789ab.parquet").write_bytes(b"of another plan")
    leftover = run.root / f".{existing_file}.0123abcd.tmp"
    leftover.write_bytes(b"PAR1")
    run.require_own()
    assert leftover.exists()  # without the lease: another driver might be writing this file
    assert run.create({"schema": 1}, local_run.plan())
    assert not leftover.exists()
    assert (run.manifest()["schema"], run.plan()) == (1, local_run.plan())
    run.open()
    assert [path.name for path in run.root.glob("plan*")] == [run.manifest()["plan"]]


def test_first_of_two_concurrent_drivers_writes_the_plan(run, one_unit_plan):
    other = replace(one_unit_plan, rows_per_unit=7)
    assert not RunDirectory(run.root).create({"schema": 2}, other)
    assert (run.manifest()["schema"], run.plan()) == (1, one_unit_plan)
    assert [path.name for path in run.root.glob("plan*")] == [run.manifest()["plan"]]


def test_manifest_without_plan_is_damaged(run):
    write_atomic(run.root / "run.json", b'{"schema": 1}')
    with pytest.raises(ConfigError, match="names no plan"):
        run.plan()


def test_dead_letters_of_uncommitted_units_are_kept(run):
    write_atomic(run.failed / "unit-00000000.deadbeef.jsonl", b"{}\n")
    assert run.remove_leftovers() == 0
    assert len(list(run.failed.iterdir())) == 1


def test_driver_that_lost_its_lease_changes_nothing(local_run):
    local_run.commit(0, ROWS.slice(0, 1), make_usage(num_rows=1, num_failed_rows=1), [dead_letter(1)])
    with hold(local_run) as lease:
        local_run.hold(lease)
        other_lease = (local_run.root / ".lease" / "1.json").read_text().replace('"number": 1', '"number": 2')
        (local_run.root / ".lease" / "2.json").write_text(other_lease)
        leftovers = [local_run.data / ".unit-00000001.parquet.0123.tmp", local_run.root / "plan.0123456789ab.parquet"]
        for path in leftovers:
            path.touch()
        for action in (local_run.open, local_run.remove_leftovers, lambda: plan_retry(local_run, local_run.plan())):
            with pytest.raises(RunInUse):
                action()
        assert all(path.exists() for path in leftovers)
        assert local_run.plan().num_retries == 0


def test_only_one_of_two_concurrent_retries_is_written(run):
    run.commit(0, ROWS.slice(0, 1), make_usage(num_rows=1, num_failed_rows=1), [dead_letter(1)])
    before = run.plan()
    retries = [Retry(unit=1, supersedes=0, rows=(1,))]
    run.add_retries(retries, number=1)
    with pytest.raises(RunInUse, match="retry 1"):
        run.add_retries(retries, number=before.num_retries + 1)
    assert run.plan().num_retries == 1


def test_unwritable_folder_is_refused(tmp_path, local_run):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(tmp_path / "file" / "run").create({}, local_run.plan())


@pytest.mark.parametrize("content", [b"", b"PAR1 cut off"])
def test_damaged_unit_is_named_with_a_hint(run, content):
    write_atomic(run.unit_path(0), content)
    with pytest.raises(PeagleError, match=r"unit-00000000\.parquet is damaged(.|\n)*delete this file"):
        list(run.usages())


def test_parquet_file_of_another_program_is_named(run):
    sink = io.BytesIO()
    pq.write_table(ROWS, sink)
    write_atomic(run.unit_path(0), sink.getvalue())
    with pytest.raises(PeagleError, match="not written by peagle"):
        list(run.usages())


def dead_letter(row_id, reason="x"):
    return {"id": f"{row_id:09d}", "reason": reason}


def test_retry_replaces_dead_letters_of_its_rows(run):
    assert run.commit(0, ROWS.slice(0, 1), make_usage(num_rows=1, num_failed_rows=1), [dead_letter(1)])
    plan = plan_retry(run, run.plan())
    assert [(unit.unit, unit.supersedes, unit.rows) for unit in plan.units[1:]] == [(1, 0, (1,))]
    assert run.plan() == plan
    assert plan.num_rows == 2
    assert list(run.dead_letters()) == []
    assert [usage.num_failed_rows for usage in run.usages()] == [0]

    assert plan_retry(run, plan) == plan
    assert run.commit(1, ROWS.slice(1, 0), make_usage(num_rows=0, num_failed_rows=1), [dead_letter(1, "again")])
    assert list(run.dead_letters()) == [dead_letter(1, "again")]
    assert [usage.num_failed_rows for usage in run.usages()] == [0, 1]
    assert run.remove_leftovers() == 0

    next_plan = plan_retry(run, run.plan())
    assert (next_plan.units[-1].unit, next_plan.units[-1].supersedes, next_plan.units[-1].attempt) == (2, 1, 3)
    assert run.commit(2, ROWS.slice(1), make_usage(num_rows=1), [])
    assert list(run.dead_letters()) == []
    assert sum(usage.num_rows for usage in run.usages()) == 2


def test_regenerated_unit_has_new_dead_letters(run):
    run.commit(0, ROWS.slice(0, 1), make_usage(num_rows=1, num_failed_rows=1), [dead_letter(1)])
    plan = plan_retry(run, run.plan())
    run.unit_path(0).unlink()
    (regenerated, retry) = plan.remaining_units(run.committed())
    assert ((regenerated.unit, regenerated.rows), (retry.unit, retry.rows)) == ((0, (0,)), (1, (1,)))

    reopened = RunDirectory(run.root)
    assert reopened.commit(0, ROWS.slice(0, 0), make_usage(num_rows=0, num_failed_rows=1), [dead_letter(0, "new")])
    assert reopened.commit(1, ROWS.slice(1), make_usage(num_rows=1), [])
    assert list(reopened.dead_letters()) == [dead_letter(0, "new")]
    assert [usage.num_failed_rows for usage in reopened.usages()] == [1, 0]

    next_plan = plan_retry(reopened, plan)
    assert [(unit.unit, unit.supersedes, unit.rows, unit.attempt) for unit in next_plan.units[2:]] == [(2, 0, (0,), 2)]
    assert list(reopened.dead_letters()) == []
    assert [usage.num_failed_rows for usage in reopened.usages()] == [0, 0]
    assert plan_retry(reopened, next_plan) == next_plan


def test_damaged_retry_plan_is_named(run):
    write_atomic(run.root / "plan-0001.parquet", b"PAR1 cut off")
    with pytest.raises(ConfigError, match=r"plan-0001\.parquet is damaged"):
        run.plan()


def test_stop_signal_is_only_for_workers_of_the_same_driver(run):
    worker, worker_of_next_driver = (RunDirectory(run.root, driver=number) for number in (1, 2))
    with hold(run) as lease:
        run.hold(lease)
        assert worker.stop.grace_s() is None
        run.stop.request(7.5)
        assert worker.stop.grace_s() == 7.5
        assert worker_of_next_driver.stop.grace_s() is None
    with hold(run):  # the signal of a killed driver is cleared
        assert worker.stop.grace_s() is None


# --- on S3


@pytest.fixture
def remote_run(s3, one_unit_plan):
    return make_run("s3://bucket/runs/first", one_unit_plan)


@pytest.mark.parametrize("fault", [500, 503, "connection_cut", "response_lost"])
def test_repeated_store_requests_do_not_duplicate_a_commit(remote_run, s3, fault):
    letters = [{"id": "1", "reason": "x"}]
    s3.fail(fault, method="PUT", path="/data/", times=2)
    s3.fail(fault, method="PUT", path="/failed/")
    assert remote_run.commit(0, ROWS.slice(0, 1), make_usage(num_rows=1, num_failed_rows=1), letters)
    assert list(remote_run.dead_letters()) == letters
    assert [usage.num_rows for usage in remote_run.usages()] == [1]
    assert remote_run.remove_leftovers() == 0


def test_failed_store_write_commits_nothing(remote_run, s3):
    s3.fail(403, method="PUT", path="/data/")
    with pytest.raises(StorageError, match=r"unit-00000000\.parquet"):
        remote_run.commit(0, ROWS, make_usage(), [])
    assert remote_run.committed() == set()
    assert remote_run.commit(0, ROWS, make_usage(), [])
    s3.fail(403, method="GET", path="/data/unit")
    with pytest.raises(StorageError, match="cannot be read") as error:
        list(remote_run.usages())
    assert "damaged" not in str(error.value)


def test_unit_metadata_on_s3_is_read_once(remote_run, s3):
    for unit in range(40):
        remote_run.commit(unit, ROWS, make_usage(), [])
    assert [usage.num_rows for usage in remote_run.usages()] == [2] * 40
    assert remote_run.remove_leftovers() == 0
    assert list(remote_run.dead_letters()) == []
    assert s3.count("GET", "/data/unit") == 40


def test_stop_signal_on_s3_is_polled_again_after_an_error(remote_run, s3, one_unit_plan):
    poll_stop = remote_run.stop.reader()
    s3.fail(403, method="GET", path=".stop.json")
    remote_run.stop.request(7.5)
    deadline = time.monotonic() + 10
    while poll_stop() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert poll_stop() == 7.5
    assert make_run("s3://bucket/runs/second", one_unit_plan).stop.reader()() is None


def test_copied_unit_file_is_not_a_unit(run):
    run.commit(0, ROWS, make_usage(), [])
    write_atomic(run.data / "unit-00000001 (copy).parquet", b"")
    write_atomic(run.data / "unit-x.parquet", b"")
    assert run.committed() == {0}
    assert len(list(run.usages())) == 1


def test_missing_or_damaged_dead_letters_are_an_error(run):
    run.commit(0, ROWS, make_usage(num_failed_rows=1), [{"id": "000000001"}])
    path = run.failed / run.dead_letters_name(0)
    write_atomic(path, b'{"id"')
    with pytest.raises(PeagleError, match="dead letters of unit 0"):
        list(run.dead_letters())
    path.unlink()
    with pytest.raises(PeagleError, match=r"dead letters of unit 0(.|\n)*restore the file"):
        list(run.letters_of_unit(0))


@pytest.mark.parametrize("data", [b"PAR1xx", b""])
def test_damaged_ledger_file_is_named(run, data):
    write_atomic(run.ledger / "session-x.parquet", data)
    with pytest.raises(PeagleError, match=r"session-x\.parquet is damaged"):
        run.sessions()
