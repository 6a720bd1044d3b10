"""Sizes of a corpus's work units: large at first, smaller at the end of the run.

The small units are cut from the first rows, because the number of rows need not be known for that; `plan.py` schedules
them last. `docs/decisions/0009-short-tail.md` has the reasons.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_ROWS = 256
_UNITS_PER_ENGINE = 16  # with fewer, the last unit of one engine leaves the others idle for long
# Chosen with benchmarks/bulk/tail_simulated.py, for response lengths whose longest are six times the mean.
_SMALL_UNITS_AT_ONCE = 24  # the smallest units that fill an engine
_FILL = 3  # rows of open units per concurrent request: most of them have ended already
_SLOWNESS = 3  # an engine that is this many times slower than the others still ends with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The sizes of units in corpus order: `small`, then `rows_per_unit`. The last unit of a file may be smaller."""

    rows_per_unit: int
    small: tuple[int, ...] = ()

    def sizes(self) -> Iterator[int]:
        """Yield sizes, endlessly."""
        return itertools.chain(self.small, itertools.repeat(self.rows_per_unit))


def auto_cut(num_rows: int, num_engines: int, max_num_seqs: int) -> Cut:
    """Return a cut with a short tail and few files for a big corpus.

    The smallest units keep an engine full with few of them. From the end of the run backwards, a unit is a third of an
    even share of the remaining rows among all units that engines can have in flight, up to `rows_per_unit`.
    Rows beyond `enough_rows` make no difference.

    Example: 96 rows for one engine of 16 requests: no unit below ceil(3 * 16 / 24) = 2 rows.
    >>> auto_cut(96, 1, 16).rows_per_unit, set(auto_cut(96, 1, 16).small)
    (6, {2})
    """
    smallest = math.ceil(_FILL * max_num_seqs / _SMALL_UNITS_AT_ONCE)
    num_shares = _num_shares(num_engines)
    rows_per_unit = auto_rows_per_unit(num_rows, num_engines)
    small: list[int] = []
    total = 0
    while (size := max(smallest, total // (num_shares - 1))) < rows_per_unit and total < num_rows:
        small.append(min(size, num_rows - total))
        total += size
    return Cut(rows_per_unit=rows_per_unit, small=tuple(reversed(small)))


def auto_rows_per_unit(num_rows: int, num_engines: int) -> int:
    """Return the rows of a large unit.

    >>> auto_rows_per_unit(48, 1), auto_rows_per_unit(10_000_000, 8)
    (3, 256)
    """
    return max(1, min(_MAX_ROWS, math.ceil(num_rows / (_UNITS_PER_ENGINE * num_engines))))


def enough_rows(num_engines: int) -> int:
    """Return a number of rows beyond which the cut does not change."""
    return _MAX_ROWS * max(_UNITS_PER_ENGINE, _num_shares(1)) * num_engines


def _num_shares(num_engines: int) -> int:
    # Each engine has the units that it works on, and one that waits.
    return _SLOWNESS * (_SMALL_UNITS_AT_ONCE + 1) * num_engines


def calls_per_engine(cut: Cut, max_num_seqs: int) -> int:
    """Return the units that an engine works on simultaneously, so that rows of the smallest units keep it full.

    >>> calls_per_engine(Cut(rows_per_unit=256), 256), calls_per_engine(Cut(rows_per_unit=3, small=(2, 1)), 8)
    (4, 25)
    """
    return math.ceil(_FILL * max_num_seqs / (cut.small[-1] if cut.small else cut.rows_per_unit)) + 1
