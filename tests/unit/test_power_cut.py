"""After a power cut, the disk has everything that was reported as complete, and nothing incomplete."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from usage_records import unit_usage

from peagle import files
from peagle.corpus.rows import Span
from peagle.economics.ledger import append_request, requests_file
from peagle.economics.usage import RequestUsage
from peagle.files import GroupSync
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import hold_lease, read_lease
from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.prepare import plan_retry
from pipelines.online.batches.records import FILE_PREFIX, INPUT, BatchRequest, StoredFile, new_id
from pipelines.online.batches.store import BatchStore
from pipelines.online.gateway.keys import edit_keys, new_key, read_keys
from tests.power_cut import recording

USAGE = unit_usage(num_failed_rows=1, num_prompt_tokens=1, num_output_tokens=1, busy_s=0.1)
TABLE = pa.table({"id": ["000000000"], "response": ["a"]})
LETTERS = [{"id": "000000001", "reason": "x", "message": "", "row": {}}]


@pytest.fixture
def disk(tmp_path):
    """A model of the disk of the empty folder `disk.root`."""
    (tmp_path / "disk").mkdir()
    with recording(tmp_path / "disk") as disk:
        disk.root = tmp_path / "disk"
        yield disk


@pytest.fixture
def images(disk, tmp_path):
    """Return a function that yields each possible content of the disk after a power cut."""

    def possible_images():
        shutil.rmtree(tmp_path / "images", ignore_errors=True)
        yield from disk.images(tmp_path / "images")

    return possible_images


# --- the model of a disk


def test_disk_model_keeps_only_synced_data(disk, images):
    (disk.root / "unsynced").write_bytes(b"x")
    with (disk.root / "bytes").open("wb") as file:
        file.write(b"bytes without a name")
        file.flush()
        os.fsync(file.fileno())
    (disk.root / "name").write_bytes(b"a name without bytes")
    assert list(next(images()).iterdir()) == []
    files.sync_folder(disk.root)
    worst, *others = ({path.name: path.read_bytes() for path in image.iterdir()} for image in images())
    assert worst == {"unsynced": b"", "bytes": b"bytes without a name", "name": b""}
    assert any(other["name"] == b"a name without bytes" for other in others)


# --- one file


def test_completed_writes_and_deletions_are_durable(disk, images):
    files.make_folder(disk.root / "a" / "b")
    path = disk.root / "a" / "b" / "file"
    files.write_atomic(path, b"old")
    files.write_atomic(path, b"new")
    files.write_once(path.with_name("once"), b"1")
    with files.atomic_file(path.with_name("large")) as file:
        file.write(b"large")
    for name in ("gone", "stays"):
        files.write_atomic(path.with_name(name), b"x")
    files.remove(path.with_name("gone"))
    for image in images():
        folder = image / "a" / "b"
        contents = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith(".tmp")}
        assert contents == {"file": b"new", "once": b"1", "large": b"large", "stays": b"x"}


def test_second_writer_syncs_the_name(disk, images, monkeypatch):
    path = disk.root / "run.json"
    with monkeypatch.context() as killed_writer:
        killed_writer.setattr(files, "sync_folder", lambda _: None)  # the first writer is killed before the sync
        files.write_once(path, b"first")
    assert not files.write_once(path, b"second")
    assert all((image / "run.json").read_bytes() == b"first" for image in images())


# --- a run


class CompleteRun:
    """A run that is started, completed and retried. `reported` has the units that were reported as committed."""

    def __init__(self, root):
        self.run, self.reported, self.num_retries = RunDirectory(root), set(), 0
        self.is_created = False

    def execute(self):
        span = Span(path="a", format="jsonl", first_row=0, num_rows=2)
        units = tuple(WorkUnit(unit=n, first_id=2 * n, span=span) for n in range(2))
        plan = Plan(units=units, rows_per_unit=2, schema=pa.schema([("p", pa.string())]), corpus_fingerprint="c")
        with hold_lease(self.run.root, expiry_s=30, command=["x"], announce=print) as lease:
            self.run.hold(lease)
            self.is_created = self.run.create({"schema": 1}, plan)
            self._commit(0, LETTERS)
            self._commit(1, [])
            plan_retry(self.run, self.run.plan())
            self.num_retries = 1
            self._commit(2, [])
            self.run.remove_leftovers()

    def _commit(self, unit, letters):
        assert self.run.commit(unit, TABLE, USAGE, letters)
        self.reported.add(unit)

    def check(self, image):
        """Check that files are complete and that all reported units exist."""
        run = RunDirectory(image)
        read_lease(run.root)
        assert run.exists or not self.is_created
        if run.exists:
            plan = run.plan()
            assert run.committed() >= self.reported
            assert plan.num_retries >= self.num_retries
            for unit in run.committed():
                assert run.usage(unit) == USAGE
                list(run.letters_of_unit(unit))


def test_run_is_consistent_after_a_power_cut_at_any_time(disk, images, monkeypatch):
    """Simulate power cuts before and after each system call that changes a name."""
    complete_run, num_checks = CompleteRun(disk.root), 0

    def check_images():
        nonlocal num_checks
        num_checks += 1
        for image in images():
            complete_run.check(image)

    def with_power_cuts(change):
        def check_and_change(*args, **options):
            if str(disk.root) in str(args[0]):  # not a call that writes an image
                check_images()
            change(*args, **options)

        return check_and_change

    for name in ("link", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, with_power_cuts(getattr(os, name)))
    complete_run.execute()
    check_images()
    assert num_checks > 30


# --- the endpoint


def revoke_a_key(root):
    keys = root / "keys" / "keys.json"
    for name in ("alice", "mallory"):
        with edit_keys(keys, create=True) as records:
            records.append(new_key(name)[1])
    with edit_keys(keys) as records:
        records[:] = [record for record in records if record.name != "mallory"]


def require_key_stays_revoked(image):
    assert [record.name for record in read_keys(image / "keys" / "keys.json")] == ["alice"]


def create_a_batch(root):
    store = BatchStore(root / "batches")
    store.prepare()
    for name in ("kept", "deleted"):
        with store.writer(new_id(FILE_PREFIX)) as (path, target):
            target.write(b"{}\n")
        file = StoredFile(
            id=Path(path).stem, owner="alice", filename=name, purpose=INPUT, num_bytes=3, created_at=1.0, at=path,
            expires_at=None, batch_id=None,
        )  # fmt: skip
        store.add_file(file)
    store.remove_file(file)
    key = new_key("alice")[1].without_hash()
    batch = BatchRequest(
        id=f"batch_{1:028x}", key=key, endpoint="/v1/chat/completions", input_file_id="f", completion_window="24h",
        created_at=1.0, expires_at=2.0,
    )  # fmt: skip
    store.add_batch(batch)


def require_batch_and_one_file(image):
    store = BatchStore(image / "batches")
    assert [batch.id for batch in store.batches("alice")] == [f"batch_{1:028x}"]
    assert [file.filename for file in store.files("alice")] == ["kept"]
    assert len(list((image / "batches" / "files").glob("*.jsonl"))) == 1


def answer_a_request(root):
    files.make_folder(root / "ledger")
    for name in ("r1", "r2"):
        record = RequestUsage(
            request_id=name, key="alice", model="m", drafter=None, outcome="ok", ttft_s=0.1, usd=0.5,
            usage=replace(USAGE, num_failed_rows=0),
        )  # fmt: skip
        append_request(root / "ledger", record)
        GroupSync(requests_file(root / "ledger", "s")).sync().result(20)


def require_both_requests(image):
    lines = requests_file(image / "ledger", "s").read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == ["r1", "r2"]


OPERATIONS = [
    (revoke_a_key, require_key_stays_revoked),
    (create_a_batch, require_batch_and_one_file),
    (answer_a_request, require_both_requests),
]
NAMES = [call.__name__ for call, _ in OPERATIONS]


@pytest.mark.parametrize(("call", "check"), OPERATIONS, ids=NAMES)
def test_completed_calls_survive_power_cut(disk, images, call, check):
    call(disk.root)
    for image in images():
        check(image)


# --- a real file system: an ext4 image, copied directly after the call, as a power cut would leave it


@contextlib.contextmanager
def mounted(image, folder):
    folder.mkdir()
    result = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no loop device can be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def ext4_after(call, tmp_path):
    """Return the content of an ext4 file system after a power cut directly after `call`."""
    if shutil.which("mkfs.ext4") is None or os.geteuid() != 0:
        pytest.skip("a separate file system needs root and mkfs.ext4")
    image, copy = tmp_path / "ext4", tmp_path / "ext4-cut"
    subprocess.run(["truncate", "-s", "32M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with mounted(image, tmp_path / "before") as root:
        call(root)
        shutil.copyfile(image, copy)
    return mounted(copy, tmp_path / "after")


@pytest.mark.skipif(sys.platform != "linux", reason="ext4 is Linux's")
@pytest.mark.parametrize(("call", "check"), OPERATIONS, ids=NAMES)
def test_completed_calls_survive_power_cut_on_ext4(tmp_path, call, check):
    with ext4_after(call, tmp_path) as root:
        check(root)
