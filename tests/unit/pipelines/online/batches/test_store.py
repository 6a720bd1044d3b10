from dataclasses import replace
from types import SimpleNamespace

import pytest

from peagle.errors import ConfigError
from pipelines.online.batches import records
from pipelines.online.batches.records import FILE_PREFIX, Progress, new_id
from pipelines.online.batches.store import BatchStore


@pytest.fixture
def place(root, clock):
    """A store on a disk and one in a bucket."""
    made = BatchStore(root, now=clock)
    made.prepare()
    return made


def test_a_key_has_its_own_files_in_their_order_also_after_a_restart(place, upload, clock):
    first = upload(place, b"one\n")
    clock.now += 1
    second = upload(place, b"two\n")
    others = upload(place, owner="bob")
    for store in (place, BatchStore(place.root, now=clock)):
        assert store.files("alice") == [second, first]
        assert store.file(first.id, "alice") == first
        assert store.file(others.id, "alice") is None
        with store.open(first) as file:
            assert file.read() == b"one\n"
    place.remove_file(first)
    assert place.files("alice") == [second]
    with pytest.raises(FileNotFoundError):
        place.open(first)


def test_a_batch_has_one_order_one_progress_and_one_cancellation(place, make_order, clock):
    order = make_order(metadata={"a": "b"}, output_expires_s=3600)
    place.add_batch(order)
    other = BatchStore(place.root, now=clock)
    assert other.batch(order.id, "alice").order == order
    assert other.batch(order.id, "bob") is None
    progress = Progress(status="in_progress", model="m", num_requests=3, errors=({"code": "x"},))
    place.save(order.id, progress)
    assert other.batch(order.id, "alice").progress == progress  # also where it was read before
    batch = place.cancel(place.batch(order.id, "alice"))
    clock.now += 5
    assert other.cancel(batch).cancelling_at == batch.cancelling_at == 100
    assert [one.id for one in other.unfinished()] == [order.id]
    place.save(order.id, replace(progress, status="cancelled"))
    assert other.unfinished() == []
    assert [one.id for one in other.batches("alice")] == [order.id]


def test_what_is_read_while_the_scheduler_says_more_does_not_take_its_place(store, make_order, monkeypatch):
    batch_id = store.add_batch(make_order()).id

    def read(path):
        if path.parent.name == "progress":
            store.save(batch_id, Progress(status="completed"))

    monkeypatch.setattr("pipelines.online.batches.store._read", read)
    for _ in range(2):
        assert store.batch(batch_id, "alice").progress.status == "completed"


@pytest.mark.parametrize("name", ["../orders/x", "..", "", "file-1", "batch_" + "0" * 28 + "/../x"])
def test_what_is_no_id_is_not_looked_for(store, name):
    assert store.file(name, "alice") is None
    assert store.batch(name, "alice") is None


def test_batches_are_listed_the_newest_first(store, make_order, monkeypatch):
    moments = iter([1.0, 2.0, 300.0])
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: next(moments)))
    ids = [store.add_batch(replace(make_order(), id=records.new_id("batch_"))).id for _ in range(3)]
    assert [batch.id for batch in store.batches("alice")] == ids[::-1]
    assert [batch.id for batch in store.unfinished()] == ids


def test_a_deleted_output_takes_the_answers_of_its_run_along(store, make_order):
    batch = store.add_batch(make_order(output_expires_s=3600))
    run = store.run_place(batch.id)
    exported = ("export/openai-batch/output.jsonl", "export/openai-batch/errors.jsonl")
    for name in ("data/unit-0.parquet", "failed/unit-0.jsonl", *exported, "report.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"x")
    ids = store.add_outputs(batch, (exported[0], 1), 1, 100.0)
    assert all(store.file(file_id, "alice").expires_at == 3700 for file_id in ids)
    store.remove_file(store.file(ids[0], "alice"))
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {"failed/unit-0.jsonl", exported[1], "report.json"}
    store.remove_file(store.file(ids[1], "alice"))
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["report.json"]


def test_a_file_whose_time_is_over_is_not_there(store, upload, clock):
    stored = upload(store, expires_at=150.0)
    assert store.file(stored.id, "alice") == stored
    clock.now = 151
    assert store.file(stored.id, "alice") is None


def test_an_upload_that_breaks_off_leaves_nothing(store):
    def broken():
        with store.writer(new_id(FILE_PREFIX)) as (_, target):
            target.write(b"half")
            raise ConnectionError

    with pytest.raises(ConnectionError):
        broken()
    assert not list((store.root / "files").iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        BatchStore(tmp_path / "file").prepare()
