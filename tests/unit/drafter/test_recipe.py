from peagle.drafter.recipe import EpochOrder, plan_batches


def test_batches_hold_every_document_once_and_are_full() -> None:
    lengths = [5, 9, 3, 7, 8, 2, 6]
    batches = plan_batches(lengths, batch_tokens=12, seed=0)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(sum(lengths[i] for i in batch) >= 12 for batch in batches[:-1])
    assert batches == plan_batches(lengths, batch_tokens=12, seed=0)
    assert batches != plan_batches(lengths, batch_tokens=12, seed=1)


def test_steps_count_through_epochs_each_in_an_order_of_its_own() -> None:
    lengths = [1] * 7
    order = EpochOrder(lengths, batch_tokens=2, seed=4)
    steps = [order.documents(step) for step in range(8)]
    epochs = [[place for step in steps[start : start + 4] for place in step] for start in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 2
    assert epochs[0] != epochs[1]
    assert EpochOrder(lengths, batch_tokens=2, seed=4).documents(6) == steps[6]
