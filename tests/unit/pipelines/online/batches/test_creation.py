from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from peagle.requests.fields import CHAT_URL
from pipelines.online.batches.creation import BatchCreator, NewBatch, Quota
from pipelines.online.batches.records import BatchProgress
from pipelines.online.batches.settings import KeyQuota
from pipelines.online.batches.store import BatchStore
from pipelines.online.errors import ApiError

DAY_S = 24 * 3600
QUOTA = KeyQuota(max_unfinished_batches=3, max_stored_files=5)


@pytest.fixture
def store(root, clock):
    batch_store = BatchStore(root, now=clock, monotonic=clock)
    batch_store.prepare()
    return batch_store


def make_creator(store):
    return BatchCreator(store, Quota(store, QUOTA), QUOTA)


@pytest.fixture
def creator(store):
    return make_creator(store)


@pytest.fixture
def body(store, upload):
    return new_batch(upload(store).id)


def new_batch(file_id, **changes):
    return NewBatch(input_file_id=file_id, endpoint=CHAT_URL, completion_window="24h", **changes)


def refusal(function, *arguments):
    with pytest.raises(ApiError) as error:
        function(*arguments)
    return error.value.status, error.value.code


def test_idempotency_key_creates_one_batch_even_after_a_restart(store, creator, body, make_key, clock):
    first = creator.create_blocking(body, make_key(), "x")
    clock.now += 5
    restarted = make_creator(BatchStore(store.root, now=clock, monotonic=clock))
    assert (
        restarted.create_blocking(body, make_key(), "x").request
        == creator.create_blocking(body, make_key(), "x").request
        == first.request
    )
    assert creator.create_blocking(body, make_key(), "y").id != first.id
    assert creator.create_blocking(body, make_key(), None).id != first.id
    assert len(store.batches("alice")) == 3


def test_concurrent_requests_with_an_idempotency_key_create_one_batch(store, body, make_key, clock):
    creators = [make_creator(BatchStore(store.root, now=clock, monotonic=clock)) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda n: creators[n % 4].create_blocking(body, make_key(), "x"), range(16)))
    assert len({batch.id for batch in created}) == 1
    assert len(BatchStore(store.root, now=clock, monotonic=clock).batches("alice")) == 1


def test_idempotency_keys_are_separate_per_api_key(store, creator, body, upload, make_key):
    batch_of_alice = creator.create_blocking(body, make_key("alice"), "x")
    batch_of_bob = creator.create_blocking(new_batch(upload(store, owner="bob").id), make_key("bob"), "x")
    assert batch_of_alice.id != batch_of_bob.id


def test_creation_can_be_repeated_after_a_crash(store, creator, body, make_key, monkeypatch):
    monkeypatch.setattr(store, "add_batch", lambda request: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        creator.create_blocking(body, make_key(), "x")
    monkeypatch.undo()
    assert store.batches("alice") == []
    batch = creator.create_blocking(body, make_key(), "x")
    assert [item.id for item in store.batches("alice")] == [batch.id]


@pytest.mark.parametrize("idempotency_key", ["", "x" * 256, "a\tb"])
def test_invalid_idempotency_key_is_refused(creator, body, make_key, idempotency_key):
    assert refusal(creator.create_blocking, body, make_key(), idempotency_key) == (400, "invalid_value")


def test_idempotency_key_expires_after_a_day(store, creator, body, make_key, clock):
    first = creator.create_blocking(body, make_key(), "x")
    clock.now += DAY_S - 1
    store.sweep()
    assert creator.create_blocking(body, make_key(), "x").id == first.id
    clock.now += 1
    store.sweep()
    assert creator.create_blocking(body, make_key(), "x").id != first.id


def test_unfinished_batches_per_key_are_limited(store, creator, body, make_key):
    created = [creator.create_blocking(body, make_key(), None) for _ in range(3)]
    for idempotency_key in (None, "x"):
        assert refusal(creator.create_blocking, body, make_key(), idempotency_key) == (429, "rate_limit_exceeded")
    store.save(created[0].id, BatchProgress(status="cancelled"))
    creator.create_blocking(body, make_key(), None)
    assert refusal(creator.create_blocking, body, make_key(), None) == (429, "rate_limit_exceeded")
    creator.create_blocking(body, make_key(max_unfinished_batches=4), None)


def test_old_batches_without_files_make_room_for_new_ones(store, creator, body, make_key, clock):
    created = []
    for _ in range(5):
        created.append(creator.create_blocking(body, make_key(), None).id)
        store.save(created[-1], BatchProgress(status="cancelled"))
        clock.now += 1
    assert refusal(creator.create_blocking, body, make_key(), None) == (413, "storage_quota_exceeded")
    clock.now += 3 * DAY_S  # batches without files are kept for at least two days
    creator.create_blocking(body, make_key(), None)
    assert store.batch(created[0], "alice") is None
    assert [batch.id for batch in store.batches("alice")][1:] == created[:0:-1]


def test_batch_with_files_is_kept(store, creator, body, make_key, make_batch_request, clock):
    batch = store.add_batch(make_batch_request(input_file_id=body.input_file_id))
    ids = store.add_outputs(batch, ("export/openai-batch/output.jsonl", 5), 0, clock.now)
    store.save(batch.id, replace(BatchProgress(), status="completed", output_file_id=ids[0]))
    clock.now += 3 * DAY_S
    batches = store.batches("alice")
    assert not store.delete_oldest_record(batches)
    store.remove_file(store.file(ids[0], "alice"))
    assert store.delete_oldest_record(batches)
