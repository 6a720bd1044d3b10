import pytest

from pipelines.online.batches.records import Batch, BatchProgress
from pipelines.online.batches.scheduler import in_turn


@pytest.fixture
def batches_of(make_order, make_key):
    """Batches of these keys, the oldest first; the ids are the keys' names with a number."""

    def make(*names):
        return [Batch(request=make_order(key=make_key(name)), progress=BatchProgress()) for name in names]

    return make


def owners(batches):
    return [batch.request.key.name for batch in batches]


def test_keys_take_turns_however_many_batches_one_has(batches_of):
    batches = batches_of("alice", "alice", "alice", "bob", "carol", "bob")
    ordered = in_turn(batches, set(), {})
    assert owners(ordered) == ["alice", "bob", "carol", "alice", "bob", "alice"]
    assert [batch for batch in ordered if batch.request.key.name == "alice"] == batches[:3]  # the oldest first


def test_who_has_something_under_way_waits_for_those_who_have_nothing(batches_of):
    batches = batches_of("alice", "alice", "bob")
    first, *waiting = in_turn(batches, {batches[0].id}, {"alice": 1})
    assert first is batches[0]
    assert owners(waiting) == ["bob", "alice"]


def test_who_was_served_last_is_last(batches_of):
    assert owners(in_turn(batches_of("alice", "bob", "carol"), set(), {"alice": 2, "bob": 1})) == [
        "carol", "bob", "alice",
    ]  # fmt: skip
