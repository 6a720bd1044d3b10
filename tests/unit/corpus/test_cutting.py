import itertools

import pytest

from peagle.corpus.cutting import Cut, auto_cut, auto_rows_per_unit, concurrent_units, max_rows_affecting_cut
from peagle.corpus.rows import RawRow, WorkEstimate


def sizes_of(cut, num_rows):
    sizes = []
    for size in cut.sizes():
        if sum(sizes) + size >= num_rows:
            return [*sizes, num_rows - sum(sizes)]
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(
    ("num_rows", "num_engines", "expected"), [(1, 8, 1), (48, 1, 3), (10_000, 2, 256), (10**9, 1, 256)]
)
def test_auto_rows_per_unit_depends_on_rows_and_engines(num_rows, num_engines, expected):
    assert auto_rows_per_unit(num_rows, num_engines) == expected


@pytest.mark.parametrize(
    ("rows", "engines", "max_num_seqs"), [(1, 8, 256), (48, 1, 8), (1000, 4, 8), (100_000, 8, 256)]
)
def test_cut_covers_all_rows(rows, engines, max_num_seqs):
    cut = auto_cut(rows, engines, max_num_seqs)
    assert sum(sizes_of(cut, rows)) == rows
    assert list(cut.small[1:]) == sorted(cut.small[1:], reverse=True)  # the first small unit takes the remainder
    assert all(size <= cut.rows_per_unit for size in cut.small)
    assert sum(cut.small) <= rows


def test_small_units_keep_an_engine_full():
    cut = auto_cut(10**6, 4, 256)
    assert (cut.rows_per_unit, cut.small[-1]) == (256, 32)
    assert concurrent_units(cut, 256) * cut.small[-1] == 3 * 256 + 32
    # Four engines process 4 x 25 units concurrently. A unit has at most a third of the remaining rows per such unit.
    remaining = itertools.accumulate(reversed(cut.small))
    assert all(size <= max(32, rows / (3 * 4 * 25)) for size, rows in zip(reversed(cut.small), remaining, strict=True))


def test_more_than_enough_rows_do_not_change_the_cut():
    assert auto_cut(max_rows_affecting_cut(3), 3, 8) == auto_cut(10**9, 3, 8)


def test_high_concurrency_has_no_small_units():
    assert auto_cut(10**6, 1, 4096) == Cut(rows_per_unit=256)
    assert concurrent_units(Cut(rows_per_unit=256), 4096) == 49  # 3 x 4096 / 256 + 1


ESTIMATE = WorkEstimate(max_tokens=256)


@pytest.mark.parametrize(
    ("columns", "work"),
    [
        ({"prompt": "a"}, 256),
        ({"sampling": {"max_tokens": 7}}, 7),
        ({"sampling": '{"max_tokens": 7, "n": 3}'}, 21),
        ({"body": {"max_tokens": 5}}, 5),
        ({"body": {"max_completion_tokens": 6, "max_tokens": 5}}, 6),
        ({"sampling": {"max_tokens": "many"}}, 256),
        ({"sampling": {"max_tokens": -5}}, 256),
        ({"sampling": {"max_tokens": 1e300}}, 256),
        ({"sampling": {"max_tokens": 5, "n": [1]}}, 256),
        ({"sampling": "{not json"}, 256),
        ({"sampling": [1]}, 256),
    ],
)
def test_work_of_a_row_is_its_maximum_output_tokens(columns, work):
    assert ESTIMATE.of_row(RawRow(columns), 0) == work


def test_work_includes_the_prompt():
    assert ESTIMATE.of_row(RawRow({"prompt": "a"}), 4000) == 256 + 100
    assert ESTIMATE.of_rows(3, 4000.0) == 3 * 256 + 100


def test_invalid_row_has_no_work():
    assert ESTIMATE.of_row(RawRow(error="not JSON"), 10**6) == 0


def test_sampling_column_of_work_can_be_configured():
    assert WorkEstimate(max_tokens=256, column="mine").of_row(RawRow({"mine": {"max_tokens": 2}}), 0) == 2
