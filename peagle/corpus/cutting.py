"""Sizes of a corpus's work units: large at first, ever smaller at the end.

The small units are cut from the first rows of the corpus: how many rows follow need not be known for that, and
`plan.py` makes them the last to be done. `docs/decisions/0009-short-tail.md` has the reasons. Pure: counts in,
sizes out; it knows neither files nor engines.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_ROWS = 256
_UNITS_PER_ENGINE = 16  # fewer, and the last unit of one engine leaves the others idle for long
# Chosen with benchmarks/bulk/tail_simulated.py, for lengths of which the longest are six times the mean.
_SMALL_UNITS_AT_ONCE = 24  # so many of the smallest units fill an engine
_FILL = 3  # rows of open units for each request that an engine runs at once: most of them have ended already
_SLOWNESS = 3  # an engine that takes so many times as long as the others still ends with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The sizes of units in the order of the corpus: `small`, then `rows_per_unit`.

    A unit that meets the end of its file is smaller.
    """

    rows_per_unit: int
    small: tuple[int, ...] = ()

    def sizes(self) -> Iterator[int]:
        """Without end."""
        return itertools.chain(self.small, itertools.repeat(self.rows_per_unit))


def auto_cut(num_rows: int, num_engines: int, max_num_seqs: int) -> Cut:
    """A cut for a short tail that does not make a million files of a big corpus.

    The last units are as small as keeps an engine full with few of them. Going back from the end, a unit is a third of
    an even share of all rows from it on among the units that all engines can have in flight, until that is
    `rows_per_unit`.

    Args:
        num_rows: of the corpus; more than `enough_rows` make no difference.
        max_num_seqs: requests that an engine runs at once.

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
    """Rows of a large unit.

    >>> auto_rows_per_unit(48, 1), auto_rows_per_unit(10_000_000, 8)
    (3, 256)
    """
    return max(1, min(_MAX_ROWS, math.ceil(num_rows / (_UNITS_PER_ENGINE * num_engines))))


def enough_rows(num_engines: int) -> int:
    """More rows than this do not change the cut."""
    return _MAX_ROWS * max(_UNITS_PER_ENGINE, _num_shares(1)) * num_engines


def _num_shares(num_engines: int) -> int:
    """The number of units to divide the remaining rows into.

    Each engine holds as many as it works on, and one that waits.
    """
    return _SLOWNESS * (_SMALL_UNITS_AT_ONCE + 1) * num_engines


def calls_per_engine(cut: Cut, max_num_seqs: int) -> int:
    """Units that an engine works on at once.

    Enough that the rows of the last and smallest ones keep it full.

    >>> calls_per_engine(Cut(rows_per_unit=256), 256), calls_per_engine(Cut(rows_per_unit=3, small=(2, 1)), 8)
    (4, 25)
    """
    return math.ceil(_FILL * max_num_seqs / (cut.small[-1] if cut.small else cut.rows_per_unit)) + 1
