import itertools

import pytest

from peagle.corpus.cutting import Cut, auto_cut, auto_rows_per_unit, calls_per_engine, enough_rows


def sizes_of(cut, num_rows):
    sizes = []
    for size in cut.sizes():
        if sum(sizes) + size >= num_rows:
            return [*sizes, num_rows - sum(sizes)]
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(("rows", "engines", "expected"), [(1, 8, 1), (48, 1, 3), (10_000, 2, 256), (10**9, 1, 256)])
def test_auto_rows_per_unit(rows, engines, expected):
    assert auto_rows_per_unit(rows, engines) == expected


@pytest.mark.parametrize(("rows", "engines", "seqs"), [(1, 8, 256), (48, 1, 8), (1000, 4, 8), (100_000, 8, 256)])
def test_cut_covers_all_rows(rows, engines, seqs):
    cut = auto_cut(rows, engines, seqs)
    assert sum(sizes_of(cut, rows)) == rows
    assert list(cut.small[1:]) == sorted(cut.small[1:], reverse=True)  # the first has the remainder
    assert all(size <= cut.rows_per_unit for size in cut.small)
    assert sum(cut.small) <= rows


def test_small_units_keep_an_engine_full():
    cut = auto_cut(10**6, 4, 256)
    assert (cut.rows_per_unit, cut.small[-1]) == (256, 32)
    assert calls_per_engine(cut, 256) * cut.small[-1] == 3 * 256 + 32
    # Each is at most a third of an even share: the remaining rows, divided by what four engines can have in flight.
    remaining = itertools.accumulate(reversed(cut.small))
    assert all(size <= max(32, rows / (3 * 4 * 25)) for size, rows in zip(reversed(cut.small), remaining, strict=True))


def test_rows_beyond_enough_rows_make_no_difference():
    assert auto_cut(enough_rows(3), 3, 8) == auto_cut(10**9, 3, 8)


def test_no_small_units_for_high_concurrency():
    assert auto_cut(10**6, 1, 4096) == Cut(rows_per_unit=256)
    assert calls_per_engine(Cut(rows_per_unit=256), 4096) == 49
