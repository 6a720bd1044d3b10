"""Sizes of a corpus's work units: large units run first, small ones last.

The small units are cut from the first rows of the corpus, because rows beyond `max_rows_affecting_cut` need not be
counted then. `plan.py` schedules the small units last. `docs/decisions/0009-short-tail.md` has the reasons.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_ROWS = 256
_UNITS_PER_ENGINE = 16  # with fewer units, engines wait too long for the engine with the last unit
# The next three were chosen with a simulation, whose longest response is six times the mean
# (benchmarks/bulk/tail_simulated.py).
_SMALL_UNITS_PER_ENGINE = 24  # how many of the smallest units fill an engine
_OPEN_ROWS_PER_SLOT = 3  # rows of open units per engine slot; most of these rows have already finished
_MAX_SLOWDOWN = 3  # an engine that is this many times slower than the others still finishes with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The sizes of units in corpus order: `small`, then `rows_per_unit`. The last unit of a file may be smaller."""

    rows_per_unit: int
    small: tuple[int, ...] = ()

    def sizes(self) -> Iterator[int]:
        """Yield sizes, endlessly."""
        return itertools.chain(self.small, itertools.repeat(self.rows_per_unit))


def auto_cut(num_rows: int, num_engines: int, max_num_seqs: int) -> Cut:
    """Return sizes for few units, but with small units at the end of the run.

    The smallest units are large enough that `_SMALL_UNITS_PER_ENGINE` of them keep an engine full. Each unit before
    them has 1 / (`_MAX_SLOWDOWN` x units in flight) of the rows from its start to the end of the run, up to
    `rows_per_unit`. Rows beyond `max_rows_affecting_cut` make no difference.

    Example: with 96 rows and one engine of 16 slots, the smallest units have ceil(3 * 16 / 24) = 2 rows.
    >>> auto_cut(96, 1, 16).rows_per_unit, set(auto_cut(96, 1, 16).small)
    (6, {2})
    """
    smallest = math.ceil(_OPEN_ROWS_PER_SLOT * max_num_seqs / _SMALL_UNITS_PER_ENGINE)
    divisor = _rows_left_per_row_of_unit(num_engines)
    rows_per_unit = auto_rows_per_unit(num_rows, num_engines)
    small: list[int] = []
    total = 0
    while (size := max(smallest, total // (divisor - 1))) < rows_per_unit and total < num_rows:
        small.append(min(size, num_rows - total))
        total += size
    return Cut(rows_per_unit=rows_per_unit, small=tuple(reversed(small)))


def auto_rows_per_unit(num_rows: int, num_engines: int) -> int:
    """Return the rows of a large unit.

    >>> auto_rows_per_unit(48, 1), auto_rows_per_unit(10_000_000, 8)
    (3, 256)
    """
    return max(1, min(_MAX_ROWS, math.ceil(num_rows / (_UNITS_PER_ENGINE * num_engines))))


def max_rows_affecting_cut(num_engines: int) -> int:
    """Return a number of rows above which `auto_cut` returns the same sizes."""
    return _MAX_ROWS * max(_UNITS_PER_ENGINE, _rows_left_per_row_of_unit(1)) * num_engines


def _rows_left_per_row_of_unit(num_engines: int) -> int:
    # Each engine works on `_SMALL_UNITS_PER_ENGINE` units, and one more waits.
    return _MAX_SLOWDOWN * (_SMALL_UNITS_PER_ENGINE + 1) * num_engines


def concurrent_units(cut: Cut, max_num_seqs: int) -> int:
    """Return how many units an engine must work on simultaneously, so that even the smallest units keep it full.

    >>> concurrent_units(Cut(rows_per_unit=256), 256), concurrent_units(Cut(rows_per_unit=3, small=(2, 1)), 8)
    (4, 25)
    """
    return math.ceil(_OPEN_ROWS_PER_SLOT * max_num_seqs / (cut.small[-1] if cut.small else cut.rows_per_unit)) + 1
