"""A simulation of the tail of a run: equal units in corpus order, compared with shrinking units, longest first.

    python benchmarks/bulk/tail_simulated.py

The plan, the order and the number of units in flight are computed by peagle's code (`cutting.py`, `plan.py`); engines
are simulated. An engine runs `max_num_seqs` rows at the same time, each for one step per token. The duration of a step
does not depend on the number of rows. An engine that has finished a unit gets the next one, as from Ray Data. Output
lengths are those of `tail.py`: 80 % of rows have 16 to 64 tokens, 15 % have 128 to 256, and 5 % have 512.

Cases: "known" if the plan knows the lengths, "unknown" if it assumes 512 tokens for each row, and "one slow" if one
engine takes three times as long per token as the others. Results:

    wall        steps until the last row is done
    unused      share of all slots' steps until then without a row
    tail        steps from the moment when the first engine has no rows left, to the end
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence

from peagle.corpus.cutting import Cut, auto_cut, auto_rows_per_unit, concurrent_units
from peagle.corpus.rows import Span
from peagle.runs.plan import WorkUnit, longest_first

_CASES = [(4, 8, 1200), (4, 8, 12_000), (4, 64, 10_000), (8, 256, 40_000), (8, 256, 400_000)]


class Engine:
    """A simulated engine: its free slots, waiting rows, and the number of unfinished rows of each unit (`left`)."""

    def __init__(self, num_slots: int, slowness: int) -> None:
        self.free, self.slowness = num_slots, slowness
        self.waiting: deque[tuple[int, int]] = deque()
        self.left: dict[int, int] = {}
        self.idle_since = 0


def simulate(
    units: Sequence[WorkUnit],
    lengths: Sequence[int],
    num_engines: int,
    num_slots: int,
    num_concurrent_units: int,
    slow: int,
) -> tuple[int, float, int]:
    """Return wall, unused and tail, as defined in the module's docstring.

    Args:
        num_concurrent_units: an engine always has this number of units and one more, as long as there are any.
        slow: how many times slower the first engine is.
    """
    engines = [Engine(num_slots, slow if index == 0 else 1) for index in range(num_engines)]
    to_do = deque(units)
    running: list[tuple[int, int, int]] = []  # step at which a row ends, engine, unit

    def fill_slots(index: int, now: int) -> None:
        engine = engines[index]
        while engine.free and engine.waiting:
            unit, length = engine.waiting.popleft()
            engine.free -= 1
            heapq.heappush(running, (now + length * engine.slowness, index, unit))

    def hand_out(index: int) -> None:
        unit = to_do.popleft()
        rows = range(unit.first_id, unit.first_id + unit.num_rows)
        engines[index].left[unit.unit] = unit.num_rows
        engines[index].waiting.extend((unit.unit, lengths[row]) for row in rows)

    for _ in range(num_concurrent_units + 1):
        for index in range(num_engines):
            if to_do:
                hand_out(index)
    for index in range(num_engines):
        fill_slots(index, 0)
    now = 0
    while running:
        now, index, unit = heapq.heappop(running)
        engine = engines[index]
        engine.free += 1
        engine.left[unit] -= 1
        if not engine.left[unit]:
            del engine.left[unit]
            if to_do:
                hand_out(index)
        fill_slots(index, now)
        engine.idle_since = now
    least_steps = sum(lengths) / (num_engines * num_slots)
    speed = (num_engines - 1 + 1 / slow) / num_engines
    return now, 1 - least_steps / (now * speed), now - min(engine.idle_since for engine in engines)


def _lengths(num_rows: int) -> list[int]:
    generator = random.Random(0)
    kinds = [generator.random() for _ in range(num_rows)]
    return [512 if k < 0.05 else generator.randint(128, 256) if k < 0.2 else generator.randint(16, 64) for k in kinds]


def _units(cut: Cut, lengths: Sequence[int], *, is_known: bool) -> list[WorkUnit]:
    units: list[WorkUnit] = []
    row = 0
    for size in cut.sizes():
        if row == len(lengths):
            return units
        num_rows = min(size, len(lengths) - row)
        work = sum(lengths[row : row + num_rows]) if is_known else 512 * num_rows
        span = Span(path="", format="text", first_row=row, num_rows=num_rows, work=work)
        units.append(WorkUnit(unit=len(units), first_id=row, span=span))
        row += num_rows
    raise AssertionError("unreachable: the sizes of a cut are endless")


def main() -> None:
    """Print all cases as a Markdown table."""
    print("| engines x slots | rows | case | wall before | after | unused before | after | tail before | after |")  # noqa: T201
    print(f"|{' --- |' * 9}")  # noqa: T201
    for num_engines, num_slots, num_rows in _CASES:
        lengths = _lengths(num_rows)
        even = Cut(rows_per_unit=auto_rows_per_unit(num_rows, num_engines))
        shrinking = auto_cut(num_rows, num_engines, num_slots)
        for case, is_known, slow in (("known", True, 1), ("unknown", False, 1), ("one slow", True, 3)):
            units = _units(even, lengths, is_known=is_known)
            num_concurrent_units = math.ceil(2 * num_slots / even.rows_per_unit) + 1
            before = simulate(units, lengths, num_engines, num_slots, num_concurrent_units, slow)
            units = longest_first(_units(shrinking, lengths, is_known=is_known))
            after = simulate(units, lengths, num_engines, num_slots, concurrent_units(shrinking, num_slots), slow)
            pairs = [f"{a:,} | {b:,}" for a, b in ((before[0], after[0]), (before[2], after[2]))]
            shares = f"{before[1]:.1%} | {after[1]:.1%}"
            print(f"| {num_engines} x {num_slots} | {num_rows:,} | {case} | {pairs[0]} | {shares} | {pairs[1]} |")  # noqa: T201


if __name__ == "__main__":
    main()
