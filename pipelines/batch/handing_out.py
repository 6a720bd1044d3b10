"""In which order units go to engines, and in what pieces the driver hands them to Ray.

Pure functions of units; it knows neither Ray nor files.
"""

from collections.abc import Sequence

from pipelines.batch.plan import WorkUnit

_SINGLE = 512  # units at the end that are handed over one by one
_MAX_CHUNK = 256


def longest_first(units: Sequence[WorkUnit]) -> list[WorkUnit]:
    """The units with the most work first, to a factor of two; within it they stay in the order of the corpus.

    A compressed file and a Parquet row group can only be read forward: in this order each is passed over once for
    every factor of two between its units, and no more.
    """
    return sorted(units, key=lambda unit: (-unit.work.bit_length(), unit.unit))


def chunks(units: Sequence[WorkUnit]) -> list[Sequence[WorkUnit]]:
    """The units in pieces that shrink to one unit: what the driver holds grows slower than the units.

    The end is handed over unit by unit, so that its order holds; before, pieces are prepared side by side.

    >>> [len(chunk) for chunk in chunks(range(514))][:3]
    [1, 1, 1]
    """
    pieces, start = [], 0
    while start < len(units):
        size = max(1, min(_MAX_CHUNK, (len(units) - start) // _SINGLE))
        pieces.append(units[start : start + size])
        start += size
    return pieces
