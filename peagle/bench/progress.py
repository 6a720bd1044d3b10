"""How much of a benchmark is left, from what its finished parts took. Pure."""

import statistics
from collections.abc import Sequence

from peagle.bench.record import PassRecord
from peagle.bench.schedule import Pass, visits


def time_left_s(done: Sequence[PassRecord], left: Sequence[Pass], *, is_up: bool) -> float | None:
    """Seconds until the last pass ends; None before the first pass did.

    A pass is taken to last as long as those finished at its concurrency, else as the mean of all.

    Args:
        is_up: the engine of the next pass is up already.
    """
    if not done:
        return None
    num_starts = len(visits(left)) - (1 if is_up and left else 0)
    start_s = statistics.mean(record.start_s for record in done)
    return num_starts * start_s + sum(_pass_s(done, one.concurrency) for one in left)


def next_s(done: Sequence[PassRecord], one: Pass, *, is_up: bool) -> float:
    """Seconds that a pass is likely to take, its engine's start included; 0 before anything is known.

    Args:
        is_up: its engine is up already.
    """
    if not done:
        return 0.0
    start_s = 0.0 if is_up else statistics.mean(record.start_s for record in done)
    return start_s + _pass_s(done, one.concurrency)


def _pass_s(done: Sequence[PassRecord], concurrency: int) -> float:
    alike = [record.wall_s for record in done if record.concurrency == concurrency]
    return statistics.mean(alike or [record.wall_s for record in done])
