"""Whose batch is next: keys take turns, so one key's many batches do not keep another's waiting. Pure."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from pipelines.online.batches.records import Batch


def in_turn(batches: Sequence[Batch], under_way: Container[str], began: Mapping[str, int]) -> list[Batch]:
    """The batches in the order in which they are looked at: those under way, which may make room; then those of keys
    that have the least under way, then of the key that has waited longest for its turn, then the oldest.

    Args:
        batches: that have not ended, the oldest first.
        under_way: ids of those that are being worked on.
        began: by key, when its work began last, as a number that grows.
    """
    ahead = Counter(batch.order.key.name for batch in batches if batch.id in under_way)
    ranks: dict[str, int] = {}
    for batch in batches:
        owner = batch.order.key.name
        ranks[batch.id] = ahead[owner]
        if batch.id not in under_way:
            ahead[owner] += 1
    return sorted(
        batches,
        key=lambda batch: (batch.id not in under_way, ranks[batch.id], began.get(batch.order.key.name, 0)),
    )
