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
SHARES = KeyQuota(max_unfinished_batches=3, max_stored_files=5)


@pytest.fixture
def place(root, clock):
    batch_store = BatchStore(root, now=clock, monotonic=clock)
    batch_store.prepare()
    return batch_store


def creator_of(store):
    return BatchCreator(store, Quota(store, SHARES), SHARES)


@pytest.fixture
def creator(place):
    return creator_of(place)


@pytest.fixture
def body(place, upload):
    return batch_request(upload(place).id)


def batch_request(file_id, **changes):
    return NewBatch(input_file_id=file_id, endpoint=CHAT_URL, completion_window="24h", **changes)


def refusal(function, *arguments):
    with pytest.raises(ApiError) as refused:
        function(*arguments)
    return refused.value.status, refused.value.code


def test_idempotency_key_creates_one_batch_even_after_a_restart(place, creator, body, make_key, clock):
    first = creator.create_now(body, make_key(), "x")
    clock.now += 5
    later = creator_of(BatchStore(place.root, now=clock, monotonic=clock))
    assert (
        later.create_now(body, make_key(), "x").request
        == creator.create_now(body, make_key(), "x").request
        == first.request
    )
    assert creator.create_now(body, make_key(), "y").id != first.id
    assert creator.create_now(body, make_key(), None).id != first.id
    assert len(place.batches("alice")) == 3


def test_concurrent_requests_with_an_idempotency_key_create_one_batch(place, body, make_key, clock):
    several = [creator_of(BatchStore(place.root, now=clock, monotonic=clock)) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda n: several[n % 4].create_now(body, make_key(), "x"), range(16)))
    assert len({batch.id for batch in taken}) == 1
    assert len(BatchStore(place.root, now=clock, monotonic=clock).batches("alice")) == 1


def test_idempotency_keys_are_separate_per_api_key(place, creator, body, upload, make_key):
    mine = creator.create_now(body, make_key(), "x")
    bobs = creator.create_now(batch_request(upload(place, owner="bob").id), make_key("bob"), "x")
    assert mine.id != bobs.id


def test_crash_before_the_batch_is_stored_loses_nothing(place, creator, body, make_key, monkeypatch):
    monkeypatch.setattr(place, "add_batch", lambda order: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        creator.create_now(body, make_key(), "x")
    monkeypatch.undo()
    assert place.batches("alice") == []
    batch = creator.create_now(body, make_key(), "x")
    assert [item.id for item in place.batches("alice")] == [batch.id]


@pytest.mark.parametrize("name", ["", "x" * 256, "a\tb"])
def test_invalid_idempotency_key_is_refused(creator, body, make_key, name):
    assert refusal(creator.create_now, body, make_key(), name) == (400, "invalid_value")


def test_idempotency_key_expires_after_a_day(place, creator, body, make_key, clock):
    first = creator.create_now(body, make_key(), "x")
    clock.now += DAY_S - 1
    place.sweep()
    assert creator.create_now(body, make_key(), "x").id == first.id
    clock.now += 1
    place.sweep()
    assert creator.create_now(body, make_key(), "x").id != first.id


def test_unfinished_batches_per_key_are_limited(place, creator, body, make_key):
    taken = [creator.create_now(body, make_key(), None) for _ in range(3)]
    for name in (None, "x"):
        assert refusal(creator.create_now, body, make_key(), name) == (429, "rate_limit_exceeded")
    place.save(taken[0].id, BatchProgress(status="cancelled"))
    creator.create_now(body, make_key(), None)
    assert refusal(creator.create_now, body, make_key(), None) == (429, "rate_limit_exceeded")
    creator.create_now(body, make_key(max_unfinished_batches=4), None)


def test_old_batches_without_files_make_room_for_new_ones(place, creator, body, make_key, clock):
    taken = []
    for _ in range(5):
        taken.append(creator.create_now(body, make_key(), None).id)
        place.save(taken[-1], BatchProgress(status="cancelled"))
        clock.now += 1
    assert refusal(creator.create_now, body, make_key(), None) == (413, "storage_quota_exceeded")
    clock.now += 3 * DAY_S
    creator.create_now(body, make_key(), None)
    assert place.batch(taken[0], "alice") is None
    assert [batch.id for batch in place.batches("alice")][1:] == taken[:0:-1]


def test_batch_with_files_is_kept(place, creator, body, make_key, make_order, clock):
    batch = place.add_batch(make_order(input_file_id=body.input_file_id))
    ids = place.add_outputs(batch, ("export/openai-batch/output.jsonl", 5), 0, clock.now)
    place.save(batch.id, replace(BatchProgress(), status="completed", output_file_id=ids[0]))
    clock.now += 3 * DAY_S
    batches = place.batches("alice")
    assert not place.forget_oldest(batches)
    place.remove_file(place.file(ids[0], "alice"))
    assert place.forget_oldest(batches)
